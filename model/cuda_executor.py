"""Carries plans out on a GPU. The caller's thread enqueues a step and goes on; the device says itself when it is done.

    host     pack ─▶ page-locked words ─┐                                     ┌─▶ result words, the step number last
    device                              └▶ copy ─▶ scatter ─▶ … forward … ─▶ adjust ─▶ sample
                                                   └──── one graph, of a step that is not large ────┘

A batch is *persistent*: page tables, last tokens and settings stay on the device by row. A step brings what changed in
one upload. A step replays a graph captured for the next larger sizes (step_graphs.py); large ones, and those that score
a prompt's tokens, are launched kernel by kernel.

Trap: everything is enqueued on one stream of this executor's own; it becomes the submitting thread's current stream.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cuda.adjust import Adjust, StepMasks, adjust_bytes
from cuda.errors import DriverError
from cuda.frames import FrameLayout, FramePool, GrowingFramePool, plain_pages, raw_pages
from cuda.launch import DeviceLoader, KernelLoader
from cuda.page_copy import PageCopy
from cuda.sample import RECORD_WORDS, LogProbRecords, LogProbWords, Sample, StepResults, read_records, sample_bytes
from cuda.scatter import DeviceState, SamplingChanges, Scatter, StepUpload, copies_of, pack, words_for
from cuda.shared_prefix import part_floats
from mm.addresses import PAGE_SIZE, BoolArray, Int32Array, Int64Array
from mm.backing_store import BackingStore
from mm.page_copies import SwapOrders, TableChanges
from mm.shared_prefixes import SharedPrefixes
from model.blas_choice import products_by_lt, takes_lt
from model.config import ModelConfig
from model.cuda_kernels import CudaKernels, CudaStep
from model.cuda_rows import CudaRows, row_memory_bytes
from model.errors import CannotResize, OutOfDeviceMemory
from model.executor import DeviceMemory
from model.kernels import SCORED_AT_ONCE
from model.out_of_memory import is_out_of_memory
from model.parameters import Parameters
from model.start_report import StartReport, Unreported
from model.step_graphs import Graph, GraphSize, Kind, StepGraphs, ladder, step_sizes
from model.step_plan import LogProbs, ScoredTokens, StepPlan, StepResult
from model.swap_mover import SwapMover
from model.transformer import forward

RING = 4
"""Uploads and results in flight at most. The engine has two; a slot is reused only after its step was committed."""

UPLOADED_CHANGES = 1 << 16
"""Page table changes that fit into a step's upload. More happen when many long prompts are found in the page cache at
once: then they go ahead, by an ordinary copy."""

RESERVE_BYTES = 1 << 30
"""Left free for cuBLAS workspaces, those of ThinLayers (some 20 MB), graphs and the driver."""


CAPTURE_S = 1.0
"""How long a start captures graphs, 6 to 20 ms each on an H200. The others follow while nothing runs."""

log = logging.getLogger("pagewalk.executor")


@dataclass(slots=True)
class Reports:
    """What a step's result has beside tokens and flags."""

    places: Int64Array  # (N,) sequences whose log-probabilities are wanted,
    likeliest: int  # so many of the likeliest
    scored_likeliest: int  # the same of the plan's scored tokens
    starved: BoolArray | None = None  # (S,) those whose words found no memory; None: nobody's
    scored: Tensor | None = None  # (N, RECORD_WORDS) page-locked: theirs


@dataclass(slots=True)
class CudaTicket:
    """`model.step_plan.Ticket`: the step is done when the device has written its number into page-locked memory."""

    step: int
    slot: int
    sequences: int
    reports: Reports
    executor: "CudaExecutor"
    graph_hit: bool
    lost: StepResult | None = None  # of a step that the device does not know of, for want of memory

    def is_done(self) -> bool:
        return self.lost is not None or self.executor.results.is_done(self.slot, self.step)

    def wait(self) -> StepResult:
        """Raises RuntimeError if the device has failed: then the number would never come."""
        checked = time.monotonic()
        while not self.is_done():
            time.sleep(20e-6)
            if time.monotonic() - checked > 0.25:
                checked = time.monotonic()
                if self.executor.stream.query() and not self.is_done():  # raises the device's error, if there is one
                    raise RuntimeError(f"step {self.step} ended on the device without a result")
        if self.lost is not None:
            return self.lost
        return read_result(self.executor.results, self.slot, self.sequences, self.reports)


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
        every = changes.rows.astype(np.int64) * tables.shape[1] + changes.pages
        for first in range(0, len(every), UPLOADED_CHANGES):
            part = slice(first, first + UPLOADED_CHANGES)
            count = len(every[part])
            places = self.state.upload[: 2 * count].view(torch.int64)
            frames = self.state.upload[2 * count : 3 * count]
            places.copy_(torch.from_numpy(every[part]))
            frames.copy_(torch.from_numpy(changes.frames[part]))
            tables.view(-1).index_copy_(0, places, frames)

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


class CudaExecutor:
    """`model.executor.Executor` on the current CUDA device."""

    polls = 2000  # steps take milliseconds or less: poll between turns of the event loop before a thread waits

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        *,
        frames: int | None,
        utilization: float,
        max_running: int,
        max_rows: int,
        max_pages: int,
        max_batched_tokens: int,
        most_frames: int | None = None,
        swap_bytes: int = 0,
        graphs: bool = True,
        thin_rows: int | None = None,
        report: StartReport | None = None,
    ) -> None:
        """max_running: Sequences in a step; max_rows: those, and the ones that are swapped out. frames: of the pool;
        None: as `utilization` of the device's memory holds and max_rows x max_pages can use. swap_bytes: of the swap
        area, which is at most as large as the pool. most_frames: that the pool may be made to have later; None: it
        cannot be resized. thin_rows: as for CudaKernels.

        Raises OutOfDeviceMemory if there is no room for a frame; UnsupportedDevice if there are no kernels for it.
        """
        report = report or Unreported()
        device = parameters.embedding.device
        loader = DeviceLoader(device.index or 0)
        self._config, self.vocabulary = config, config.vocabulary
        self.stream = torch.cuda.Stream(device)
        self._raw_stream = int(self.stream.cuda_stream)
        self._device_index = device.index or 0
        self._latest: CudaTicket | None = None  # of the step submitted last
        with torch.cuda.stream(self.stream):
            self._program = DeviceProgram(
                config,
                parameters,
                loader,
                frames=frames,
                most_frames=most_frames,
                utilization=utilization,
                max_running=max_running,
                max_rows=max_rows,
                max_pages=max_pages,
                max_tokens=max(max_batched_tokens, max_running),
                page_locked=True,
                thin_rows=thin_rows,
            )
            pool = self._program.pool
            self.resizes_frames = isinstance(pool, GrowingFramePool)
            self._lasting_bytes = parameters.size_bytes() + (0 if self.resizes_frames else pool.data.nbytes)
            torch.cuda.reset_peak_memory_stats(device)  # loading is over
            self._graph_bytes = 0
            self.results, self.masks = self._program.results, self._program.masks.words
            self.frames, self.frame_bytes = self._program.pool.frames, self._program.pool.layout.frame_bytes
            self.start_frames = self._program.pool.usable
            self.slots = min(swap_bytes // self.frame_bytes, self.frames)
            self._store = BackingStore(self.slots, self.frame_bytes, page_locked=True)
            self._mover = SwapMover(self._program.pool, self._store)
            report.ended("memory")
            loader.finish(lambda done, total: report.progress("kernels", done, total))
            report.ended("kernels")
            self._warm_up(max_running)
            report.ended("first step")
            self._graph_memory: Any = torch.cuda.graph_pool_handle()  # one for all graphs: only one runs at a time
            has_cascade = self._program.kernels.shared_prefix is not None
            sizes = ladder(max_running=max_running, max_tokens=self._program.max_tokens, has_cascade=has_cascade)
            self._graphs = StepGraphs(sizes if graphs else iter(()), self._captured, seconds=CAPTURE_S)
            self.step_sizes = step_sizes(self._program.max_tokens) if graphs else ()
            self.stream.synchronize()
            report.ended("graphs")

    def submit(self, plan: StepPlan) -> CudaTicket:
        """Enqueue one step and return at once."""
        if torch._C._cuda_getCurrentRawStream(self._device_index) != self._raw_stream:
            torch.cuda.set_stream(self.stream)  # once per thread: the caller's current stream from now on
        slot, sequences = plan.step % RING, len(plan.rows)
        reports = self._program.upload(plan, slot, self._raw_stream)
        graph = self._graph_for(plan)
        reports.scored, lost = self._program.launch(plan, self._raw_stream, graph, slot=slot)
        self._latest = CudaTicket(plan.step, slot, sequences, reports, self, graph is not None, lost)
        return self._latest

    def sample(self, plan: StepPlan) -> None:
        """Enqueue the sampling of the masked step submitted last."""
        if self._latest is not None and self._latest.lost is None:
            weighs = self._program.rows.weighs(plan)
            self._program.sample(self._raw_stream, len(plan.rows), weighs=weighs, masked=plan.masked)

    @property
    def ready_slots(self) -> int:
        return self._store.ready_slots

    def want_slots(self, slots: int) -> None:
        """BackingStore.want."""
        self._store.want(slots)

    def resize(self, frames: int, slots: int) -> None:
        """Frames that go are unmapped when the steps and copies submitted so far have ended: it waits for those."""
        pool = self._program.pool
        if frames != pool.usable:
            if not isinstance(pool, GrowingFramePool):
                raise CannotResize("the pool was made in one piece")
            try:
                pool.resize(frames)
            except DriverError as error:
                raise CannotResize(f"no memory for {frames} frames: {error}") from error
        self._store.resize(slots)

    def start(self, orders: SwapOrders, store: BackingStore | None = None) -> None:
        """Enqueue swap copies on the side stream, behind the steps submitted so far."""
        self._mover.start(orders, self.stream, store)

    def new_store(self, pages: int) -> BackingStore:
        """Page-locked memory."""
        return BackingStore(pages, self.frame_bytes, page_locked=True)

    def swapped_page(self, slot: int) -> Tensor:
        """BackingStore.slot."""
        return self._store.slot(slot)

    def plain_pages(self, raw: Tensor) -> Tensor:
        """cuda.frames.plain_pages, on the host."""
        return plain_pages(raw, self._program.pool.layout)

    def raw_pages(self, pages: Tensor) -> Tensor:
        """cuda.frames.raw_pages, on the host."""
        return raw_pages(pages, self._program.pool.layout)

    def ended(self) -> list[tuple[int, bool]]:
        """Tickets of swap orders that have ended, and whether they succeeded."""
        return self._mover.ended()

    def close(self) -> None:
        """Finish what is enqueued. Idempotent. The device's memory goes with the object, a growing pool's at once."""
        self._store.close()
        self._mover.close()
        self.stream.synchronize()
        self._graphs.clear()
        if isinstance(self._program.pool, GrowingFramePool):
            self._program.pool.close()

    @property
    def captured_graphs(self) -> int:
        """Graphs that exist."""
        return self._graphs.captured

    @property
    def device_memory(self) -> DeviceMemory:
        """Activations by what torch has given out; graphs by what was free on the device, which others may use, too."""
        peak = torch.cuda.max_memory_allocated(self._device_index) - self._lasting_bytes
        return DeviceMemory(max(0, peak), self._graphs.captured, self._graphs.most, self._graph_bytes)

    def use_idle_time(self) -> bool:
        """Capture a graph that is missing."""
        with torch.cuda.stream(self.stream):
            return self._graphs.capture_next()

    def _graph_for(self, plan: StepPlan) -> Graph | None:
        """The smallest graph that holds the plan. Those of mixed steps know no groups: every row reads for itself."""
        if plan.scored is not None:
            return None
        sequences = len(plan.rows)
        if plan.masked is not None:
            is_decode = plan.decodes == sequences
            kind = Kind.LOGITS if is_decode else Kind.MIXED_LOGITS
            return self._graphs.find(kind, len(plan.token_ids), sequences, weighs=True)
        if plan.decodes == sequences:
            kind = Kind.CASCADE if self._program.has_groups(plan) else Kind.DECODE
            return self._graphs.find(kind, sequences, sequences, weighs=self._program.rows.weighs(plan))
        return self._graphs.find(Kind.MIXED, len(plan.token_ids), sequences, weighs=True)

    def _warm_up(self, max_running: int) -> None:
        """Run padding only, once at the largest sizes: loads modules, lets cuBLAS take its workspace."""
        program, stream = self._program, self._raw_stream
        program.run(CudaStep(stream, max_running, max_running, decodes=max_running, prefill_blocks=0))
        blocks = program.kernels.prefill_blocks(program.max_tokens, max_running)
        program.run(CudaStep(stream, max_running, program.max_tokens, decodes=0, prefill_blocks=blocks))
        self.stream.synchronize()

    def _captured(self, size: GraphSize) -> Graph | None:
        """Nothing runs on the device for this, and it does not wait for what runs. None: there is no memory for it."""
        try:
            return self._capture(size)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        torch.cuda.empty_cache()
        log.warning("no memory on the device for more CUDA graphs: steps of those sizes are launched kernel by kernel")
        return None

    def _capture(self, size: GraphSize) -> Graph:
        step = CudaStep(
            self._raw_stream,
            sequences=size.sequences,
            tokens=size.tokens,
            decodes=size.sequences,
            prefill_blocks=0,
            has_groups=size.kind is Kind.CASCADE,
            weighs=size.weighs,
        )
        if size.kind in (Kind.MIXED, Kind.MIXED_LOGITS):
            blocks = self._program.kernels.prefill_blocks(size.tokens, size.sequences)
            step = replace(step, prefill_blocks=blocks)
        free, _ = torch.cuda.mem_get_info(self._device_index)
        graph = torch.cuda.CUDAGraph()
        # thread-local: another thread may page-lock memory for swap meanwhile
        graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
        try:
            with products_by_lt(wanted=takes_lt(self._config, size.tokens)):
                if size.kind.samples:
                    self._program.run(step)
                else:
                    self._program.compute(step)
        except BaseException:
            with suppress(RuntimeError):  # that it captured nothing whole
                graph.capture_end()
            raise
        graph.capture_end()
        self._graph_bytes += max(0, free - torch.cuda.mem_get_info(self._device_index)[0])
        return graph


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
