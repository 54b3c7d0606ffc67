"""Launcher of sample.cu: logits to tokens on the device, and the result of a step in page-locked memory.

The kernel writes tokens and flags straight into host memory, and the step's number after them, so the host learns that
a step is done by reading one word: no event, no copy, nothing to wait for.
"""

import torch
from torch import Tensor

from cuda.errors import ShapeMismatch
from cuda.launch import KernelLoader, KernelSpec
from cuda.scatter import DeviceState
from cuda.tensors import check_tensor
from mm.addresses import Int32Array

SLICES = 8
RESULT_HEADER_WORDS = 16


class StepResults:
    """A ring of results in host memory: slot s belongs to whichever step named it in its upload.

    words (slots, 16 + 2 capacity) int32: the step number, written last; tokens from word 16, flags from word 16 +
    capacity.
    """

    def __init__(self, slots: int, capacity: int, *, page_locked: bool) -> None:
        """capacity: sequences of one step. page_locked: needed where a device writes; plain memory serves the tests on
        a CPU.
        """
        self.capacity = capacity
        self.tensor = torch.full(
            (slots, RESULT_HEADER_WORDS + 2 * capacity), -1, dtype=torch.int32, pin_memory=page_locked
        )
        self.words: Int32Array = self.tensor.numpy()

    def is_done(self, slot: int, step: int) -> bool:
        """Whether `step`, which was given `slot`, has ended."""
        return bool(self.words[slot, 0] == step)

    def read(self, slot: int, sequences: int) -> tuple[Int32Array, Int32Array]:
        """Copies of (tokens, failed), (sequences,) each, of a step that is done. Token -1: the sequence did not
        sample.
        """
        tokens, failed = self.words[slot, RESULT_HEADER_WORDS:].reshape(2, self.capacity)[:, :sequences].copy()
        return tokens, failed


class Sample:
    """Samples for one DeviceState and vocabulary."""

    def __init__(self, loader: KernelLoader, state: DeviceState, results: StepResults, vocabulary: int) -> None:
        if results.capacity < state.max_sequences:
            raise ShapeMismatch(f"results of {results.capacity} sequences for steps of {state.max_sequences}")
        self.state, self.results, self.vocabulary = state, results, vocabulary
        specs = [
            KernelSpec("sample_scan", "PPPPi", 256, overlap=True),
            KernelSpec("sample_finish", "PPPPPPPPPPPPPPPPii", 1024, overlap=True),
        ]
        self._scan, self._finish = loader.load("sample.cu", specs)
        device = state.upload.device
        self._partials = torch.zeros(state.max_sequences, SLICES, dtype=torch.int64, device=device)
        self._not_finite = torch.zeros(state.max_sequences, SLICES, dtype=torch.int32, device=device)
        self._outcome = torch.zeros(2, results.capacity, dtype=torch.int32, device=device)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, stream: int, logits: Tensor, padded_sequences: int) -> None:
        """Sample for every sequence of the step with samples set, and report the step as done.

        logits (padded_sequences, V) float32, row s of sequence s; rows that do not sample are not read. Every step ends
        with this call, also one in which nobody samples: it reports the failed flags, and clears them.
        """
        state, results = self.state, self.results
        check_tensor("logits", logits, (padded_sequences, self.vocabulary), torch.float32)
        if padded_sequences == 0:
            raise ShapeMismatch("a step has at least one sequence")
        self._scan.launch(
            stream, (SLICES, padded_sequences), logits, state.samples, self._partials,
            self._not_finite, self.vocabulary,
        )  # fmt: skip
        self._finish.launch(
            stream, padded_sequences, logits, state.rows, state.samples, state.lengths,
            state.temperatures, state.top_ks, state.top_ps, state.seeds,
            self._partials, self._not_finite, state.failed, state.last_tokens,
            state.upload, self._outcome, results.tensor, self._ticket, self.vocabulary, results.capacity,
        )  # fmt: skip
