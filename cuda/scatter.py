"""Launcher of scatter.cu: what lives on the device between steps, and the one upload that changes it.

The host packs a step into one page-locked buffer of int32 words (`pack`); one copy brings it to `DeviceState.upload`;
the kernel spreads it. So a decode step of a thousand sequences costs one copy and one launch, and both can be in a
graph: sizes and places are read from the upload's header.

    word   0 step    1 sequences   2 tokens   3 decodes   4 table changes   5 settings   6 result slot   7 likeliest
    words  8-15      where the sections begin: rows, starts, query_starts, samples, token_ids, changes, settings, copies
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cuda.errors import ShapeMismatch
from cuda.frames import SHARED
from cuda.launch import KernelLoader, KernelSpec
from mm.addresses import BoolArray, Int32Array
from mm.page_copies import PageCopies, TableChanges

HEADER_WORDS = 16
THREADS = 256
MAX_BLOCKS = 64  # of the scatter kernel: threads take elements in turn


SETTINGS = np.dtype(
    [
        ("seed", np.uint64),
        ("top_p", np.float64),
        ("typical_p", np.float64),
        ("least_mass", np.uint64),  # floor(min_p * 2**40)
        ("history", np.uint64),  # device address of the row's tokens by position, or 0
        ("lists", np.uint64),  # device address of what adjust.cu applies, or 0
        ("temperature", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("top_k", np.int32),
        ("log_probs", np.int32),  # likeliest tokens that it asks for; -1: nothing
        ("prompt", np.int32),  # tokens of the prompt
        ("min_tokens", np.int32),
        ("adjusts", np.int32),  # whether adjust.cu has anything to do
        ("unused", np.int32, 3),
    ]
)
"""How a row samples, as settings.cuh has it. What the fields mean is written in model/sampler.py."""

SETTING_WORDS = SETTINGS.itemsize // 4

SettingsArray = np.ndarray[tuple[int], np.dtype[np.void]]
"""(N,) of SETTINGS."""


def greedy_settings(rows: int) -> SettingsArray:
    """Rows that ask for nothing."""
    settings = np.zeros(rows, SETTINGS)
    settings["top_p"] = settings["typical_p"] = settings["repetition"] = 1.0
    settings["log_probs"] = -1
    return settings


@dataclass(frozen=True, slots=True)
class SamplingChanges:
    """Settings to store for rows; (N,) each."""

    rows: Int32Array
    settings: SettingsArray


def _no_settings() -> SamplingChanges:
    return SamplingChanges(np.empty(0, np.int32), np.empty(0, SETTINGS))


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
    likeliest: int = 0  # likeliest tokens to report for every sequence that asks for log-probabilities
    changes: TableChanges = field(default_factory=TableChanges)
    settings: SamplingChanges = field(default_factory=_no_settings)
    copies: PageCopies = field(default_factory=PageCopies)


def words_for(*, sequences: int, tokens: int, changes: int, settings: int, copies: int) -> int:
    """Words of an upload of these sizes."""
    return HEADER_WORDS + 4 * sequences + 1 + tokens + 3 * changes + (1 + SETTING_WORDS) * settings + 2 * copies


def pack(upload: StepUpload, words: Int32Array) -> int:
    """Write `upload` into `words` (page-locked memory). Returns how many words it took: what has to be copied.

    Raises ShapeMismatch if they are not enough. Table changes can be sent ahead, in uploads without sequences.
    """
    changes, settings, copies = upload.changes, upload.settings, upload.copies
    sequences, tokens = len(upload.rows), len(upload.token_ids)
    arrays = [upload.rows, upload.starts, upload.query_starts, upload.samples, upload.token_ids]
    arrays += [changes.rows, changes.pages, entries_of(changes)]
    if len(settings.rows):
        arrays.append(_settings_words(settings))
    arrays += [copies.sources, copies.targets]
    rows_at = HEADER_WORDS
    starts_at = rows_at + sequences
    query_starts_at = starts_at + sequences
    samples_at = query_starts_at + sequences + 1
    token_ids_at = samples_at + sequences
    changes_at = token_ids_at + tokens
    settings_at = changes_at + 3 * len(changes)
    copies_at = settings_at + (1 + SETTING_WORDS) * len(settings.rows)
    used = copies_at + 2 * len(copies)
    if used > len(words):
        raise ShapeMismatch(f"an upload of {used} words does not fit into {len(words)}")
    words[:HEADER_WORDS] = (
        *(
            upload.step,
            sequences,
            tokens,
            upload.decodes,
            len(changes),
            len(settings.rows),
            upload.result_slot,
            upload.likeliest,
        ),
        *(rows_at, starts_at, query_starts_at, samples_at, token_ids_at, changes_at, settings_at, copies_at),
    )
    np.concatenate(arrays, out=words[HEADER_WORDS:used])  # one call: this runs in every step
    return used


def entries_of(changes: TableChanges) -> Int32Array:
    """(N,) what the device's page tables have for changes.frames: with SHARED beside the frame where it is shared."""
    if not len(changes.shared):
        return changes.frames
    return np.where(changes.shared, changes.frames | SHARED, changes.frames)


def copies_of(upload: Tensor, words: Int32Array, count: int) -> tuple[Tensor, Tensor]:
    """(sources, targets), both (count,) int32 on the device, of the step that `words` holds packed."""
    begin = int(words[15])
    return upload[begin : begin + count], upload[begin + count : begin + 2 * count]


def _settings_words(settings: SamplingChanges) -> Int32Array:
    """Each row, and the words of its settings after it."""
    words = np.empty((len(settings.rows), 1 + SETTING_WORDS), np.int32)
    words[:, 0] = settings.rows
    words[:, 1:] = settings.settings.view(np.int32).reshape(-1, SETTING_WORDS)
    return words.ravel()


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

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.upload = zeros(upload_words)
        self.page_tables = zeros(max_rows, max_pages)
        greedy = greedy_settings(max_rows).view(np.int32).reshape(-1, SETTING_WORDS)
        self.settings = torch.from_numpy(greedy).to(device)  # (max_rows, SETTING_WORDS)
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
        (self._kernel,) = loader.load("scatter.cu", [KernelSpec("scatter", "PPPPPPiiiii", THREADS)])

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
            stream, grid, state.upload, state.page_tables, state.settings, state.sequences, state.tokens,
            state.last_tokens, state.page_tables.shape[1], state.sequences.shape[1], state.tokens.shape[1],
            padded_sequences, padded_tokens,
        )  # fmt: skip
