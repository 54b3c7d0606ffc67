"""Launchers of scan.cu, weigh.cu, sample.cu and finish.cu: logits to tokens and log-probabilities, and a step's result
in page-locked memory.

The kernel writes tokens, flags and records of log-probabilities straight into host memory, and the step's number after
them, so the host learns that a step is done by reading one word: no event, no copy, nothing to wait for.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cuda.errors import ShapeMismatch
from cuda.launch import Kernel, KernelLoader, KernelSpec
from cuda.scatter import DeviceState, SettingsArray
from cuda.tensors import check_tensor
from mm.addresses import BoolArray, Int32Array, Int64Array

THREADS = 256
FIXED_BYTES = 33_936  # sampling.cuh: Shared
BLOCK_BYTES = 232_448  # shared memory of one block on Hopper, at most
SHARED_BYTES = 115_712  # so that a multiprocessor holds two blocks
LARGEST_TEAM = 8
FEW_SEQUENCES = 32
"""Up to here every row gets the largest team: even so each multiprocessor has two blocks at most."""

MAX_VOCABULARY = 1 << 19
GREEDY_BELOW = np.float32(1e-5)  # temperatures; sampling.cuh
MANY = 128  # a top-k beyond is left to a team; sampling.cuh
RESULT_HEADER_WORDS = 16
MAX_LIKELIEST = 32
RECORD_WORDS = 2 + 2 * MAX_LIKELIEST

STRIP_QUADS, SEGMENTS_OF_STRIP = 128, 8  # sampling.cuh
# weigh.cu
WEIGH_BLOCKS = 4  # of a multiprocessor
QUADS_AT_ONCE = 4 * THREADS
MAX_PARTS = 19  # of a row: finish.cu looks at the spans of them all at once
SCAN_WORDS = 4
CANDIDATE_WORDS = 2 * LARGEST_TEAM * 384
SPAN_WORDS = 8
SPANS = MAX_PARTS * THREADS // 32


class LogProbWords(NamedTuple):
    """Records of N places. What they mean: model.step_plan.LogProbs."""

    chosen: npt.NDArray[np.float32]  # (N,)
    ranks: Int32Array  # (N,)
    ids: Int32Array  # (N, likeliest)
    values: npt.NDArray[np.float32]  # (N, likeliest)


def read_records(words: Int32Array, likeliest: int) -> LogProbWords:
    """Copies out of records (N, RECORD_WORDS)."""
    values = words[:, 2 + MAX_LIKELIEST : 2 + MAX_LIKELIEST + likeliest]
    return LogProbWords(
        words[:, 0].copy().view(np.float32),
        words[:, 1].copy(),
        words[:, 2 : 2 + likeliest].copy(),
        values.copy().view(np.float32),
    )


class StepResults:
    """A ring of results in host memory: slot s belongs to whichever step named it in its upload.

    words (slots, 16 + (2 + RECORD_WORDS) capacity) int32: the step number, written last; tokens from word 16, flags
    from word 16 + capacity, records of log-probabilities after them.
    """

    def __init__(self, slots: int, capacity: int, *, page_locked: bool) -> None:
        """capacity: sequences of one step. page_locked: needed where a device writes; plain memory serves the tests on
        a CPU.
        """
        self.capacity = capacity
        words = RESULT_HEADER_WORDS + (2 + RECORD_WORDS) * capacity
        self.tensor = torch.full((slots, words), -1, dtype=torch.int32, pin_memory=page_locked)
        self.words: Int32Array = self.tensor.numpy()
        self._outcomes = self.words[:, RESULT_HEADER_WORDS : RESULT_HEADER_WORDS + 2 * capacity].reshape(slots, 2, -1)
        self._records = self.words[:, RESULT_HEADER_WORDS + 2 * capacity :].reshape(slots, capacity, RECORD_WORDS)

    def is_done(self, slot: int, step: int) -> bool:
        """Whether `step`, which was given `slot`, has ended."""
        return bool(self.words[slot, 0] == step)

    def read(self, slot: int, sequences: int) -> tuple[Int32Array, Int32Array]:
        """Copies of (tokens, failed), (sequences,) each, of a step that is done. Token -1: the sequence did not
        sample.
        """
        tokens, failed = self._outcomes[slot, :, :sequences].copy()
        return tokens, failed

    def read_log_probs(self, slot: int, places: Int64Array, likeliest: int) -> LogProbWords:
        """Of the sequences at `places` of a step that is done, all of which sampled and ask for so many, or fewer."""
        return read_records(self._records[slot, places], likeliest)


@dataclass(frozen=True, slots=True)
class TeamShape:
    """How many blocks share a row, and what they keep of it."""

    blocks: int
    is_resident: bool  # the row is brought into their shared memory
    shared_bytes: int  # of each

    @classmethod
    def of(cls, capability: int, vocabulary: int, *, largest: bool) -> "TeamShape":
        """The smallest team that leaves a multiprocessor room for two blocks, or the largest there is.

        Before Hopper blocks do not see each other's shared memory: a block a row reads global memory.
        """
        if capability < 90:
            return cls(1, is_resident=False, shared_bytes=FIXED_BYTES)
        quads = (vocabulary + 6) // 4  # a row may begin anywhere in its first one
        for blocks in (1, 2, 4, LARGEST_TEAM):
            shared_bytes = FIXED_BYTES + 16 * -(-quads // blocks)
            if shared_bytes <= SHARED_BYTES and not largest:
                break
        if shared_bytes > BLOCK_BYTES:
            return cls(LARGEST_TEAM, is_resident=False, shared_bytes=FIXED_BYTES)
        return cls(blocks, is_resident=True, shared_bytes=shared_bytes)


class _Teams:
    """One kernel of sample.cu with the team that suits the number of rows."""

    def __init__(self, loader: KernelLoader, name: str, signature: str, vocabulary: int) -> None:
        if vocabulary > MAX_VOCABULARY:
            raise ShapeMismatch(f"a vocabulary of {vocabulary}: sums hold {MAX_VOCABULARY} tokens")
        self._kernels: list[tuple[Kernel, int]] = []
        for largest in (True, False):
            shape = TeamShape.of(loader.capability, vocabulary, largest=largest)
            spec = KernelSpec(
                f"{name}<{'true' if shape.is_resident else 'false'}>",
                signature,
                THREADS,
                shared_bytes=shape.shared_bytes,
                overlap=True,
                cluster=shape.blocks,
            )
            (kernel,) = loader.load("sample.cu", [spec])
            self._kernels.append((kernel, shape.blocks))

    def launch(self, stream: int, rows: int, *arguments: Tensor | int, in_turn: bool = False) -> None:
        """A team a row; in_turn: no more teams than run at the same time."""
        kernel, blocks = self._kernels[rows > FEW_SEQUENCES]
        teams = min(rows, kernel.clusters_at_once) if in_turn and blocks > 1 else rows
        kernel.launch(stream, teams * blocks, *arguments)


def segments_of(vocabulary: int) -> int:
    """Segments of a row, wherever it begins in its first quad."""
    quads = (vocabulary + 6) // 4
    return SEGMENTS_OF_STRIP * -(-quads // STRIP_QUADS)


def sample_bytes(sequences: int, vocabulary: int) -> int:
    """Device memory of a Sample."""
    return 4 * sequences * (SCAN_WORDS + CANDIDATE_WORDS + SPANS * SPAN_WORDS + segments_of(vocabulary) + 3)


def want_all_logits(settings: SettingsArray, vocabulary: int) -> BoolArray:
    """(N,) which rows want more than their largest logits: is_weighed and needs_team of sampling.cuh."""
    draws = settings["temperature"] >= GREEDY_BELOW
    has_top_k = (settings["top_k"] > 0) & (settings["top_k"] < vocabulary)
    has_few = np.where(has_top_k, settings["top_k"] <= MANY, (settings["top_p"] == 1.0) & (settings["least_mass"] > 0))
    return (settings["log_probs"] >= 0) | (draws & ~has_few)


class Sample:
    """Samples for one DeviceState and vocabulary."""

    def __init__(self, loader: KernelLoader, state: DeviceState, results: StepResults, vocabulary: int) -> None:
        if results.capacity < state.max_sequences:
            raise ShapeMismatch(f"results of {results.capacity} sequences for steps of {state.max_sequences}")
        self.state, self.results, self.vocabulary = state, results, vocabulary
        self._sample = _Teams(loader, "sample", "PPPPPPPPPii", vocabulary)
        (self._scan,) = loader.load("scan.cu", [KernelSpec("scan", "PPPPPPPii", THREADS, overlap=True)])
        weigh = KernelSpec("weigh", "PPPPPPPi", THREADS, overlap=True)
        gather = KernelSpec("gather", "PPPPPPPPi", THREADS, overlap=True)
        self._weigh, self._gather = loader.load("weigh.cu", [weigh, gather])
        finish = KernelSpec("finish", "PPPPPPPPPPPPPPPPPiiii", THREADS, shared_bytes=FIXED_BYTES, overlap=True)
        (self._finish,) = loader.load("finish.cu", [finish])
        self._blocks = WEIGH_BLOCKS * loader.multiprocessors
        device = state.upload.device
        self._scans = torch.zeros(state.max_sequences, SCAN_WORDS, dtype=torch.int32, device=device)
        self._segments = segments_of(vocabulary)
        self._maxima = torch.empty(state.max_sequences, self._segments, device=device)
        self._candidates = torch.empty(state.max_sequences, CANDIDATE_WORDS, dtype=torch.int32, device=device)
        self._spans = torch.empty(state.max_sequences, SPANS, SPAN_WORDS, dtype=torch.int32, device=device)
        self._outcome = torch.zeros(2, results.capacity, dtype=torch.int32, device=device)
        self._queue = torch.zeros(2 + state.max_sequences, dtype=torch.int32, device=device)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(
        self, stream: int, logits: Tensor, masked: Tensor, padded_sequences: int, *, weighs: bool = True
    ) -> None:
        """Sample for every sequence of the step with samples set, and report the step as done.

        logits (padded_sequences, V) float32, row s of sequence s, adjusted; masked (max_sequences,) int32: what
        cuda.adjust says of them. Rows that do not sample are not read. weighs: whether one that does may be among
        those of `want_all_logits`. Every step ends with this call, also one in which nobody samples: it reports the
        failed flags, and clears them.
        """
        state, results = self.state, self.results
        check_tensor("logits", logits, (padded_sequences, self.vocabulary), torch.float32)
        if padded_sequences == 0:
            raise ShapeMismatch("a step has at least one sequence")
        most = -(-self.vocabulary // (4 * QUADS_AT_ONCE))  # parts that are worth a block
        parts = max(1, min(self._blocks // padded_sequences, most, MAX_PARTS))
        grid = parts, padded_sequences
        self._scan.launch(
            stream, (self._parts_of_scan(padded_sequences), padded_sequences), logits, state.rows, state.samples,
            state.settings, self._scans, self._maxima, self._queue, self.vocabulary, self._segments,
        )  # fmt: skip
        if weighs:
            self._weigh.launch(
                stream, grid, logits, state.rows, state.samples, state.settings, self._scans, self._spans, self._queue,
                self.vocabulary,
            )  # fmt: skip
            self._gather.launch(
                stream, grid, logits, state.rows, state.samples, state.settings, self._scans, self._spans,
                self._candidates, self._queue, self.vocabulary,
            )  # fmt: skip
            self._sample.launch(
                stream, padded_sequences, logits, state.rows, state.lengths, state.settings, self._queue, masked,
                state.upload, self._outcome, results.tensor, self.vocabulary, results.capacity, in_turn=True,
            )  # fmt: skip
        self._finish.launch(
            stream, padded_sequences, logits, state.rows, state.samples, state.lengths, state.settings, self._scans,
            self._maxima, self._spans, self._candidates, self._queue, masked, state.failed, state.last_tokens,
            state.upload, self._outcome, results.tensor, self._ticket, self.vocabulary, results.capacity, parts,
            self._segments,
        )  # fmt: skip

    def reset(self) -> None:
        """Forget what a call has left that ended amid its launches."""
        for tensor in (self._scans, self._queue, self._ticket):
            tensor.zero_()

    def _parts_of_scan(self, sequences: int) -> int:
        """Blocks for a row: a warp of theirs looks at one strip if there are few rows, else at four."""
        strips = self._segments // SEGMENTS_OF_STRIP
        parts = -(-strips // (THREADS // 32))
        return parts if sequences * parts <= self._blocks else -(-parts // 4)


class LogProbRecords:
    """Log-probabilities of given tokens, of logits as they are."""

    def __init__(self, loader: KernelLoader, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._log_probs = _Teams(loader, "log_probs", "PPPii", vocabulary)

    def __call__(self, stream: int, logits: Tensor, targets: Tensor, likeliest: int, records: Tensor) -> None:
        """logits (N, V) float32; targets (N,) int32; records (N, RECORD_WORDS) int32, written."""
        rows = len(targets)
        check_tensor("logits", logits, (rows, self.vocabulary), torch.float32)
        check_tensor("targets", targets, (rows,), torch.int32)
        check_tensor("records", records, (rows, RECORD_WORDS), torch.int32)
        if not 0 <= likeliest <= MAX_LIKELIEST:
            raise ShapeMismatch(f"the {likeliest} likeliest: 0 to {MAX_LIKELIEST} can be reported")
        if rows:
            likeliest = min(likeliest, self.vocabulary)
            self._log_probs.launch(stream, rows, logits, targets, records, likeliest, self.vocabulary)
