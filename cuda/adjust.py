"""Launcher of adjust.cu: penalties, biases and bans, and the words in which a row's lists and a step's masks travel."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cuda.launch import KernelLoader, KernelSpec
from cuda.scatter import DeviceState
from cuda.tensors import check_tensor
from mm.addresses import Int32Array

THREADS = 512
BLOCKS = 64  # each has a table of the vocabulary
MASK_PARTS = 7  # blocks beside each of them that share the masks
LISTS_HEADER_WORDS = 8


def pack_lists(
    vocabulary: int,
    biases: Mapping[int, float],
    allowed_ids: Sequence[int],
    barred_ids: Sequence[int],
    bad_words: Sequence[Sequence[int]],
) -> Int32Array:
    """What adjust.cu applies to a row, as it wants it. allowed_ids: empty: all. Ids are below `vocabulary`."""
    largest = float(np.finfo(np.float32).max)
    values = np.clip(np.array(list(biases.values()), np.float64), -largest, largest).astype(np.float32)
    lengths = [len(word) for word in bad_words]
    parts = [
        np.array([*biases, *values.view(np.int32)], np.int32),
        np.array(barred_ids, np.int32),
        np.array([*np.cumsum([0, *lengths]), *(token for word in bad_words for token in word)], np.int32),
        _mask_of(vocabulary, allowed_ids) if len(allowed_ids) else np.empty(0, np.int32),
    ]
    begins = LISTS_HEADER_WORDS + np.cumsum([0, *(len(part) for part in parts[:-1])])
    header = np.array([len(biases), len(barred_ids), len(bad_words), len(allowed_ids) > 0, *begins], np.int32)
    return np.concatenate((header, *parts))


def _mask_of(vocabulary: int, ids: Sequence[int]) -> Int32Array:
    """(ceil(vocabulary / 32),): bit id % 32 of word id // 32 is set for every id."""
    bits = np.zeros(mask_words(vocabulary) * 32, np.bool_)
    bits[np.asarray(ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def adjust_bytes(sequences: int, vocabulary: int) -> int:
    """Device memory of an Adjust and of its StepMasks."""
    return 4 * (BLOCKS * vocabulary + sequences + sequences * (1 + mask_words(vocabulary)))


def mask_words(vocabulary: int) -> int:
    """int32 words of one mask: bit id % 32 of word id // 32 is set for every token that may come."""
    return -(-vocabulary // 32)


class StepMasks:
    """What some sequences of a step may sample, on its way to the device: which mask a sequence has, and the masks.

    One is enough: it is written again when the step that it was sent for has ended.
    """

    def __init__(self, sequences: int, vocabulary: int, device: str | torch.device, *, page_locked: bool) -> None:
        """sequences: of one step, padding counted."""
        self.width = mask_words(vocabulary)
        words = sequences * (1 + self.width)
        self._host = torch.empty(words, dtype=torch.int32, pin_memory=page_locked)
        self._device = torch.empty(words, dtype=torch.int32, device=device)
        self._sequences = sequences
        self._numbers: Int32Array = self._host.numpy()[:sequences]
        self.words: Int32Array = self._host.numpy()[sequences:].reshape(sequences, self.width)  # for the host to write
        self.numbers, self.masks = self._device[:sequences], self._device[sequences:]

    def send(self, masked: Int32Array) -> None:
        """Enqueue the copy on torch's current stream: words[i] is for sequence masked[i], the others have none."""
        self._numbers[:] = -1
        self._numbers[masked] = np.arange(len(masked))
        used = self._sequences + len(masked) * self.width
        self._device[:used].copy_(self._host[:used], non_blocking=True)


class Adjust:
    """Adjusts the logits of one DeviceState and vocabulary."""

    def __init__(self, loader: KernelLoader, state: DeviceState, vocabulary: int) -> None:
        self.state, self.vocabulary = state, vocabulary
        (self._kernel,) = loader.load("adjust.cu", [KernelSpec("adjust", "PPPPPPPPPiii", THREADS, overlap=True)])
        device = state.upload.device
        self._counts = torch.zeros(BLOCKS, vocabulary, dtype=torch.int32, device=device)
        self.masked = torch.zeros(state.max_sequences, dtype=torch.int32, device=device)

    def __call__(self, stream: int, logits: Tensor, padded_sequences: int, masks: StepMasks | None = None) -> None:
        """Adjust the rows that sample and ask for it, in place: logits (padded_sequences, V) float32, row s of sequence
        s. masks: sent for this step. `masked` (max_sequences,) tells `Sample` about them, which clears it.
        """
        state = self.state
        check_tensor("logits", logits, (padded_sequences, self.vocabulary), torch.float32)
        self._kernel.launch(
            stream, (min(BLOCKS, padded_sequences), 1 + MASK_PARTS), logits, state.rows, state.samples, state.lengths,
            state.settings, None if masks is None else masks.numbers, None if masks is None else masks.masks,
            self._counts, self.masked, padded_sequences, self.vocabulary, mask_words(self.vocabulary),
        )  # fmt: skip
