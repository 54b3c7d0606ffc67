"""Which tokens rows may sample at all, as bit arrays: what a grammar allows next (step A.4 of model/sampler.py)."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mm.addresses import Int32Array, Int64Array

if TYPE_CHECKING:  # torch takes a second: front ends do without
    from torch import Tensor


def mask_words(vocabulary: int) -> int:
    """int32 words of one mask."""
    return -(-vocabulary // 32)


class TokenMasks(NamedTuple):
    """Masks of N rows: row places[i] may sample the tokens whose bit id % 32 of word words[i, id // 32] is set."""

    places: Int64Array  # (N,)
    words: Int32Array  # (N, mask_words(V))

    def apply(self, logits: "Tensor") -> None:
        """Minus infinity for all other tokens of these rows of logits (R, V), on the CPU, in place."""
        values = logits.numpy()
        vocabulary = values.shape[1]
        for place, words in zip(self.places.tolist(), self.words, strict=True):
            bits = np.unpackbits(words.view(np.uint8), count=vocabulary, bitorder="little")
            np.putmask(values[place], bits == 0, np.float32(-np.inf))
