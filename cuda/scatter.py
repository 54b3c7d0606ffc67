"""Launcher of scatter.cu: what lives on the device between steps, and the one upload that changes it.

The host packs a step into one page-locked buffer of int32 words (`pack`); one copy brings it to `DeviceState.upload`;
the kernel spreads it. So a decode step of a thousand sequences costs one copy and one launch, and both can be in a
graph: sizes and places are read from the upload's header.

    word   0 step    1 sequences   2 tokens   3 decodes   4 table changes   5 settings   6 result slot
    words  8-15      where the sections begin: rows, starts, query_starts, samples, token_ids, changes, settings, copies
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cuda.errors import ShapeMismatch
from cuda.launch import KernelLoader, KernelSpec
from mm.addresses import BoolArray, Int32Array
from mm.page_copies import PageCopies, TableChanges

HEADER_WORDS = 16
SETTING_WORDS = 7  # row, temperature, top_k, seed (2), top_p (2)
THREADS = 256
MAX_BLOCKS = 64  # of the scatter kernel: threads take elements in turn


@dataclass(frozen=True, slots=True)
class SamplingChanges:
    """Settings to store for rows; (N,) each. What they mean is written in model/sampler.py."""

    rows: Int32Array
    temperatures: npt.NDArray[np.float32]
    top_ks: Int32Array
    top_ps: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]


def _no_settings() -> SamplingChanges:
    none = np.empty(0, np.int32)
    return SamplingChanges(none, np.empty(0, np.float32), none, np.empty(0, np.float64), np.empty(0, np.uint64))


@dataclass(frozen=True, slots=True)
class StepUpload:
    """One step as the device needs to know it. Names and shapes as in model.step_plan.StepPlan."""

    step: int
    rows: Int32Array
    starts: Int32Array
    query_starts: Int32Array
    token_ids: Int32Array
    samples: BoolArray
    decodes: int
    result_slot: int = 0
    changes: TableChanges = field(default_factory=TableChanges)
    settings: SamplingChanges = field(default_factory=_no_settings)
    copies: PageCopies = field(default_factory=PageCopies)


def words_for(*, sequences: int, tokens: int, changes: int, settings: int, copies: int) -> int:
    """Words of an upload of these sizes."""
    return HEADER_WORDS + 4 * sequences + 1 + tokens + 3 * changes + SETTING_WORDS * settings + 2 * copies


def pack(upload: StepUpload, words: Int32Array) -> int:
    """Write `upload` into `words` (page-locked memory). Returns how many words it took: what has to be copied.

    Raises ShapeMismatch if they are not enough. Table changes can be sent ahead, in uploads without sequences.
    """
    changes, settings, copies = upload.changes, upload.settings, upload.copies
    sequences, tokens = len(upload.rows), len(upload.token_ids)
    arrays = [upload.rows, upload.starts, upload.query_starts, upload.samples, upload.token_ids]
    arrays += [changes.rows, changes.pages, changes.frames]
    if len(settings.rows):
        arrays += _settings_words(settings)
    arrays += [copies.sources, copies.targets]
    rows_at = HEADER_WORDS
    starts_at = rows_at + sequences
    query_starts_at = starts_at + sequences
    samples_at = query_starts_at + sequences + 1
    token_ids_at = samples_at + sequences
    changes_at = token_ids_at + tokens
    settings_at = changes_at + 3 * len(changes)
    copies_at = settings_at + SETTING_WORDS * len(settings.rows)
    used = copies_at + 2 * len(copies)
    if used > len(words):
        raise ShapeMismatch(f"an upload of {used} words does not fit into {len(words)}")
    words[:HEADER_WORDS] = (
        *(upload.step, sequences, tokens, upload.decodes, len(changes), len(settings.rows), upload.result_slot, 0),
        *(rows_at, starts_at, query_starts_at, samples_at, token_ids_at, changes_at, settings_at, copies_at),
    )
    np.concatenate(arrays, out=words[HEADER_WORDS:used])  # one call: this runs in every step
    return used


def copies_of(upload: Tensor, words: Int32Array, count: int) -> tuple[Tensor, Tensor]:
    """(sources, targets), both (count,) int32 on the device, of the step that `words` holds packed."""
    begin = int(words[15])
    return upload[begin : begin + count], upload[begin + count : begin + 2 * count]


def _settings_words(settings: SamplingChanges) -> tuple[Int32Array, ...]:
    """The sections' arrays, 64-bit numbers as two words each, the low one first."""
    seeds = settings.seeds.view(np.int32).reshape(-1, 2)
    top_ps = settings.top_ps.view(np.int32).reshape(-1, 2)
    return (
        settings.rows,
        settings.temperatures.view(np.int32),
        settings.top_ks,
        seeds[:, 0],
        seeds[:, 1],
        top_ps[:, 0],
        top_ps[:, 1],
    )


class DeviceState:
    """What stays on the device: page tables, settings and last tokens by row (R rows), and the arrays of the current
    step.

    Written by scatter: page_tables, settings, step arrays. By sample: last_tokens, failed (cleared). By kv_append:
    failed.
    """

    def __init__(
        self,
        device: str | torch.device,
        *,
        max_rows: int,
        max_pages: int,
        max_sequences: int,
        max_tokens: int,
        upload_words: int,
    ) -> None:
        """max_sequences, max_tokens: of one step, padding counted."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.upload = zeros(upload_words)
        self.page_tables = zeros(max_rows, max_pages)
        self.temperatures = zeros(max_rows, dtype=torch.float32)
        self.top_ks = zeros(max_rows)
        self.top_ps = torch.ones(max_rows, dtype=torch.float64, device=device)
        self.seeds = zeros(max_rows, dtype=torch.int64)  # bit patterns of uint64
        self.last_tokens = zeros(max_rows)
        self.failed = zeros(max_rows)
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.sequences = zeros(7, max_sequences + 1)
        self.tokens = zeros(3, max_tokens)
        # (max_sequences,) of the current step; a step's kernels use the first `padded` entries
        self.rows, self.lengths, self.decode_lengths, self.prefill_tokens, self.samples, self.last_query = (
            self.sequences[:6, :max_sequences]
        )
        self.query_starts = self.sequences[6]  # (max_sequences + 1,)
        self.token_ids, self.positions, self.token_rows = self.tokens  # (max_tokens,)


class Scatter:
    """Spreads uploads over one DeviceState."""

    def __init__(self, loader: KernelLoader, state: DeviceState) -> None:
        self.state = state
        (self._kernel,) = loader.load("scatter.cu", [KernelSpec("scatter", "PPPPPPPPPiiiii", THREADS)])

    def __call__(self, stream: int, padded_sequences: int, padded_tokens: int) -> None:
        """Carry out state.upload. Step arrays are filled up to the padded sizes: no sequence (row -1, length 0), no
        token (row -1).
        """
        state = self.state
        if padded_sequences > state.max_sequences or padded_tokens > state.max_tokens:
            raise ShapeMismatch(
                f"{padded_sequences} sequences, {padded_tokens} tokens: "
                f"at most {state.max_sequences}, {state.max_tokens}"
            )
        grid = min(MAX_BLOCKS, max(padded_sequences + 1, padded_tokens) // THREADS + 4)
        self._kernel.launch(
            stream, grid, state.upload, state.page_tables, state.temperatures, state.top_ks,
            state.top_ps, state.seeds, state.sequences, state.tokens, state.last_tokens,
            state.page_tables.shape[1], state.sequences.shape[1], state.tokens.shape[1],
            padded_sequences, padded_tokens,
        )  # fmt: skip
