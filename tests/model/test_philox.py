"""The random numbers: known answers, keys, exact products."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.philox import below, philox, random_words


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    """The vectors that Random123 publishes for philox4x32-10."""
    found = philox(*(tuple(np.array([word], np.uint64) for word in part) for part in (counter, key)))
    assert [word.item() for word in found] == words


def test_random_words_are_keyed_by_seed_and_position() -> None:
    seeds = np.array([0, 1, 2**32, 2**64 - 1, 0, 0], np.uint64)
    positions = np.array([0, 0, 0, 0, 1, 2**40])
    words = random_words(seeds, positions)
    assert len(set(words.tolist())) == 6
    assert words[0] == 0x6627E8D5 | 0xE169C58D << 32


@given(random=st.integers(0, 2**64 - 1), total=st.integers(0, 2**63 - 1))
def test_the_scaled_random_number_is_exact(random: int, total: int) -> None:
    """Every carry between the 32-bit halves: compared with Python's long integers."""
    scaled = below(np.array([total]), np.array([random], np.uint64))
    assert scaled.tolist() == [random * total >> 64]
