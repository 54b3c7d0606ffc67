"""What a step runs on a GPU, and all memory that it works in: the upload, the network, the sampling, the result.

    host     pack ─▶ page-locked words ─┐                                     ┌─▶ result words, the step number last
    device                              └▶ copy ─▶ scatter ─▶ … forward … ─▶ adjust ─▶ sample
                                                   └──── one graph, of a step that is not large ────┘

A batch is *persistent*: page tables, last tokens and settings stay on the device by row. A step brings what changed in
one upload. Streams, graphs and waiting are cuda_executor.py's.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cuda.adjust import Adjust, StepMasks, adjust_bytes
from cuda.frames import FrameLayout, FramePool, GrowingFramePool
from cuda.launch import KernelLoader
from cuda.page_copy import PageCopy
from cuda.sample import RECORD_WORDS, LogProbRecords, LogProbWords, Sample, StepResults, read_records, sample_bytes
from cuda.scatter import DeviceState, SamplingChanges, Scatter, StepUpload, copies_of, entries_of, pack, words_for
from cuda.shared_prefix import part_floats
from mm.addresses import PAGE_SIZE, BoolArray, Int32Array, Int64Array
from mm.page_copies import TableChanges
from mm.shared_prefixes import SharedPrefixes
from model.config import ModelConfig
from model.cuda_kernels import CudaKernels, CudaStep
from model.cuda_rows import CudaRows, row_memory_bytes
from model.errors import OutOfDeviceMemory
from model.kernels import SCORED_AT_ONCE
from model.out_of_memory import is_out_of_memory
from model.parameters import Parameters
from model.step_graphs import Graph
from model.step_plan import LogProbs, ScoredTokens, StepPlan, StepResult
from model.transformer import forward

RING = 4
"""Uploads and results in flight at most. The engine has two; a slot is reused only after its step was committed."""

UPLOADED_CHANGES = 1 << 16
"""Page table changes that fit into a step's upload. More happen when many long prompts are found in the page cache at
once: then they go ahead, by an ordinary copy."""

RESERVE_BYTES = 1 << 30
"""Left free for cuBLAS workspaces, those of ThinLayers and BatchLinear (some 20 MB each), graphs and the driver."""

log = logging.getLogger("pagewalk.executor")


@dataclass(slots=True)
class Reports:
    """What a step's result has beside tokens and flags."""

    places: Int64Array  # (N,) sequences whose log-probabilities are wanted,
    likeliest: int  # so many of the likeliest
    scored_likeliest: int  # the same of the plan's scored tokens
    starved: BoolArray | None = None  # (S,) those whose words found no memory; None: nobody's
    scored: Tensor | None = None  # (N, RECORD_WORDS) page-locked: theirs


def read_result(results: StepResults, slot: int, sequences: int, reports: Reports) -> StepResult:
    """The result of a step that is done."""
    tokens, flags = results.read(slot, sequences)
    failed = flags != 0
    if reports.starved is not None:
        failed |= reports.starved
    log_probs, scored = None, None
    if len(reports.places):
        log_probs = _log_probs(results.read_log_probs(slot, reports.places, reports.likeliest))
    if reports.scored is not None:
        scored = _log_probs(read_records(reports.scored.numpy(), reports.scored_likeliest))
    return StepResult(tokens, failed, log_probs, scored, reports.starved)


def _log_probs(words: LogProbWords) -> LogProbs:
    return LogProbs(words.chosen, words.ranks, words.ids, words.values)


class Launched(NamedTuple):
    """What has become of a step."""

    scored: Tensor | None  # Reports.scored
    lost: StepResult | None = None  # instead of one that comes from the device


class DeviceProgram:
    """What a step runs on the device, and all memory it works in.

    It knows no stream of its own, no graph and no waiting, so the tests run it on any loader of kernels.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        loader: KernelLoader,
        *,
        frames: int | None,
        utilization: float,
        max_running: int,
        max_rows: int,
        max_pages: int,
        max_tokens: int,
        page_locked: bool,
        thin_rows: int | None = None,
        most_frames: int | None = None,
    ) -> None:
        """thin_rows: as for CudaKernels. most_frames: as for CudaExecutor."""
        device = parameters.embedding.device
        layout = FrameLayout(config.layers, config.kv_heads, config.head_dim, parameters.embedding.dtype)
        words = words_for(
            sequences=max_running,
            tokens=max_tokens,
            changes=UPLOADED_CHANGES,
            settings=max_rows,
            copies=max_rows,
        )
        self.max_tokens = max_tokens
        self.state = DeviceState(
            device,
            max_rows=max_rows,
            max_pages=max_pages,
            max_sequences=max_running,
            max_tokens=max_tokens,
            upload_words=words,
        )
        self.results = StepResults(RING, max_running, page_locked=page_locked)
        self._uploads = torch.zeros(RING, words, dtype=torch.int32, pin_memory=page_locked)
        self._upload_words = list(self._uploads.numpy())
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        if frames is None:
            buffers = _buffer_bytes(config, layout.dtype, max_tokens, max_running)
            buffers += row_memory_bytes(max_rows, max_pages * PAGE_SIZE)
            frames = _frames_that_fit(layout, utilization, buffers, max_running * max_pages)
        if most_frames is None:
            self.pool = FramePool(layout, frames, device)
        else:
            self.pool = GrowingFramePool(layout, frames, max(frames, most_frames), device)
        self.kernels = CudaKernels(config, loader, self.pool, self.state, thin_rows=thin_rows)
        self.kernels.prepare(parameters)
        self._parameters = parameters
        self._groups: SharedPrefixes | None = None  # those of the last plan that had some
        self._groups_pay = False  # and are in shared_prefix.state
        group_words = self.kernels.shared_prefix.words if self.kernels.shared_prefix else 0
        self._group_uploads = torch.zeros(RING, group_words, dtype=torch.int32, pin_memory=page_locked)
        self._scatter = Scatter(loader, self.state)
        self._copy = PageCopy(loader, self.pool)
        self.rows = CudaRows(max_rows, config.vocabulary, device, page_locked=page_locked)
        self._adjust = Adjust(loader, self.state, config.vocabulary)
        self.masks = StepMasks(max_running, config.vocabulary, device, page_locked=page_locked)
        self._sample = Sample(loader, self.state, self.results, config.vocabulary)
        self._record = LogProbRecords(loader, config.vocabulary)
        self._records = torch.zeros(SCORED_AT_ONCE, RECORD_WORDS, dtype=torch.int32, device=device)
        self._given = torch.zeros(2, max_tokens, dtype=torch.int32, device=device)
        self._given_uploads = torch.zeros(RING, 2, max_tokens, dtype=torch.int32, pin_memory=page_locked)
        self._scores = torch.zeros(RING, max_tokens, RECORD_WORDS, dtype=torch.int32, pin_memory=page_locked)
        self._vocabulary = config.vocabulary

    def upload(self, plan: StepPlan, slot: int, stream: int) -> Reports:
        """Enqueue the copy of a plan to the device, and its page copies. `stream` must be torch's current one."""
        settings = [] if plan.settings is None else [self.rows.store(plan.settings)]
        if (moved := self.rows.make_room(plan)) is not None:
            settings.append(moved)
        places, likeliest = self.rows.reports(plan)
        words, upload = self._upload_words[slot], _upload_of(plan, slot, likeliest, settings)
        if len(upload.changes) > UPLOADED_CHANGES:
            self._send_ahead(upload.changes)
            upload = replace(upload, changes=TableChanges())
        used = pack(upload, words)
        source, target = self._copies(slot, used)
        target.copy_(source, non_blocking=True)
        if plan.groups is not None and plan.groups is not self._groups:
            self._load_groups(plan, slot)
        copies = len(plan.orders.copies)
        if copies:
            self._copy(stream, *copies_of(self.state.upload, words, copies))
        scored_likeliest = 0 if plan.scored is None else min(plan.scored.likeliest, self._vocabulary)
        return Reports(places, likeliest, scored_likeliest, self.rows.take_starved(plan.rows))

    def _load_groups(self, plan: StepPlan, slot: int) -> None:
        self._groups, self._groups_pay = plan.groups, False
        if self.kernels.shared_prefix is None or plan.groups is None:
            return
        source = self._group_uploads[slot]
        used = self.kernels.shared_prefix.pack(plan.groups, plan.rows, source.numpy())
        if used:
            self.kernels.shared_prefix.state[:used].copy_(source[:used], non_blocking=True)
            self._groups_pay = True

    def has_groups(self, plan: StepPlan) -> bool:
        """Whether an uploaded plan's decodes begin with frames that are worth reading once for all."""
        return self._groups_pay and plan.groups is not None and plan.groups is self._groups

    def _send_ahead(self, changes: TableChanges) -> None:
        """By way of the memory of uploads: this step's comes later."""
        tables = self.state.page_tables
        entries = torch.from_numpy(entries_of(changes))
        every = changes.rows.astype(np.int64) * tables.shape[1] + changes.pages
        for first in range(0, len(every), UPLOADED_CHANGES):
            part = slice(first, first + UPLOADED_CHANGES)
            count = len(every[part])
            places = self.state.upload[: 2 * count].view(torch.int64)
            target = self.state.upload[2 * count : 3 * count]
            places.copy_(torch.from_numpy(every[part]))
            target.copy_(entries[part])
            tables.view(-1).index_copy_(0, places, target)

    def _copies(self, slot: int, words: int) -> tuple[Tensor, Tensor]:
        """(page-locked, device) views of an upload's first `words`, or some more: made once for each power of two."""
        key = slot, words.bit_length()
        if key not in self._views:
            size = min(1 << key[1], self._uploads.shape[1])
            self._views[key] = self._uploads[slot, :size], self.state.upload[:size]
        return self._views[key]

    def sizes(self, plan: StepPlan, stream: int) -> CudaStep:
        """The step of a plan, without padding."""
        sequences, tokens = len(plan.rows), len(plan.token_ids)
        chunks = sequences - plan.decodes
        blocks = self.kernels.prefill_blocks(tokens - plan.decodes, chunks) if chunks else 0
        weighs = self.rows.weighs(plan)
        return CudaStep(
            stream,
            sequences,
            tokens,
            plan.decodes,
            blocks,
            has_groups=self.has_groups(plan),
            weighs=weighs,
            is_scored=plan.scored is not None,
        )

    def launch(self, plan: StepPlan, stream: int, graph: Graph | None, *, slot: int) -> "Launched":
        """Enqueue what follows the upload: by a graph, or kernel by kernel where there is none, or no memory to start
        one. Where there is none at all, caches are given back, then it is tried once more. If that does not help,
        orders and settings are carried out, and nothing else of the step is.
        """

        def plainly() -> Tensor | None:
            step = self.sizes(plan, stream)
            return (self.run if plan.masked is None else self.compute)(step, plan.scored, slot=slot)

        tries: list[Callable[[], Tensor | None]] = [plainly, plainly] if graph is None else [graph.replay, plainly]
        for attempt in tries:
            try:
                return Launched(attempt())
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            self._give_back()
        log.warning("no memory on the device for a step of %d tokens: its requests end", len(plan.token_ids))
        self._scatter(stream, len(plan.rows), len(plan.token_ids))
        return Launched(None, StepResult.without_memory(plan))

    def _give_back(self) -> None:
        """After a step that was cut for want of memory: give the device what torch keeps, and forget the step."""
        if self.state.failed.device.type == "cuda":
            torch.cuda.empty_cache()
        self.state.failed.zero_()
        self._adjust.masked.zero_()
        self._sample.reset()

    def run(self, step: CudaStep, scored: ScoredTokens | None = None, *, slot: int = 0) -> Tensor | None:
        """Everything of a step that follows its upload. Captured, or launched. Returns what `compute` does."""
        records = self.compute(step, scored, slot=slot)
        self.sample(step.stream, step.sequences, weighs=step.weighs)
        return records

    def compute(self, step: CudaStep, scored: ScoredTokens | None = None, *, slot: int = 0) -> Tensor | None:
        """The same, up to the logits. slot: of the ring; it matters where tokens are scored.

        Returns the records of the scored tokens, (N, RECORD_WORDS) page-locked: valid once the step is done, until its
        slot is used again.
        """
        assert scored is None or step.is_scored, "the tokens to be scored would not be computed"
        self._scatter(step.stream, step.sequences, step.tokens)
        self.kernels.plan(step)
        hidden = forward(self._parameters, step, self.kernels)
        records = None if scored is None else self._score(hidden, scored, step.stream, slot)
        self.kernels.logits(hidden, self._parameters, step)
        return records

    def sample(self, stream: int, sequences: int, *, weighs: bool, masked: Int32Array | None = None) -> None:
        """From the logits to the result. masked: the sequences, by place, that have the first words of `masks`."""
        if masked is not None:
            self.masks.send(masked)
        logits = self.kernels.latest_logits(sequences)
        self._adjust(stream, logits, sequences, None if masked is None else self.masks)
        self._sample(stream, logits, self._adjust.masked, sequences, weighs=weighs)

    def _score(self, hidden: Tensor, scored: ScoredTokens, stream: int, slot: int) -> Tensor:
        """Log-probabilities of given tokens, some places at a time, in the memory of the step's logits."""
        count = len(scored.places)
        records, given = self._scores[slot, :count], self._given_uploads[slot]
        given.numpy()[:, :count] = scored.places, scored.targets
        self._given.copy_(given, non_blocking=True)
        places, targets = self._given[:, :count]
        at_once = min(SCORED_AT_ONCE, self.state.max_sequences)
        for first in range(0, count, at_once):
            piece = slice(first, min(first + at_once, count))
            logits = self.kernels.logits_at(hidden, self._parameters, places[piece])
            target = self._records[: piece.stop - first]
            self._record(stream, logits, targets[piece], scored.likeliest, target)
            records[piece].copy_(target, non_blocking=True)
        return records


def _upload_of(plan: StepPlan, slot: int, likeliest: int, settings: list[SamplingChanges]) -> StepUpload:
    return StepUpload(
        step=plan.step,
        rows=plan.rows,
        starts=plan.starts,
        query_starts=plan.query_starts,
        token_ids=plan.token_ids,
        samples=plan.samples,
        decodes=plan.decodes,
        result_slot=slot,
        likeliest=likeliest,
        changes=plan.orders.table_changes,
        copies=plan.orders.copies,
        **({"settings": joined(settings)} if settings else {}),
    )


def joined(parts: list[SamplingChanges]) -> SamplingChanges:
    """Changes of different rows."""
    if len(parts) == 1:
        return parts[0]
    return SamplingChanges(
        np.concatenate([part.rows for part in parts]), np.concatenate([part.settings for part in parts])
    )


def _buffer_bytes(config: ModelConfig, dtype: torch.dtype, tokens: int, sequences: int) -> int:
    """What CudaKernels and Adjust allocate: activations of the largest step, its logits, parts of shared prefixes, and
    tables.
    """
    widths = 4 * config.hidden + (3 * config.heads + 2 * config.kv_heads) * config.head_dim + 3 * config.intermediate
    angles = config.max_positions * config.head_dim * 4
    parts = part_floats(config.heads, config.head_dim) * 4
    last = (2 * config.hidden + config.heads * config.head_dim) * dtype.itemsize
    logits = sequences * (config.vocabulary * 4 + last)
    tables = adjust_bytes(sequences, config.vocabulary) + sample_bytes(sequences, config.vocabulary)
    return tokens * widths * dtype.itemsize + logits + angles + parts + tables


def _frames_that_fit(layout: FrameLayout, utilization: float, buffers: int, useful: int) -> int:
    """Frames in what `utilization` leaves beside the weights, the buffers and a reserve; never more than are of use."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    room = int(total * utilization) - (total - free) - buffers - RESERVE_BYTES
    if room < layout.frame_bytes:
        raise OutOfDeviceMemory(
            f"no memory for keys and values: of {total >> 20} MiB, {utilization:.0%} may be used, "
            f"{(total - free) >> 20} MiB are taken and {(buffers + RESERVE_BYTES) >> 20} MiB are needed for steps"
        )
    return min(room // layout.frame_bytes, useful)
