"""Random numbers that depend on a key and a counter alone: Philox4x32-10 (Salmon 2011; the constants are Random123's).

Equal seeds and positions give equal numbers, whatever runs beside them, also after a preemption.
"""

import numpy as np
import numpy.typing as npt

from mm.addresses import Int64Array

UInt64Array = npt.NDArray[np.uint64]
Words = tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]

_LOW, _HALF = np.uint64(0xFFFF_FFFF), np.uint64(32)
_MULTIPLIERS = np.uint64(0xD251_1F53), np.uint64(0xCD9E_8D57)
_WEYL = np.uint64(0x9E37_79B9), np.uint64(0xBB67_AE85)  # golden ratio, sqrt(3) - 1


def random_words(seeds: UInt64Array, positions: Int64Array) -> UInt64Array:
    """(N,) 64 random bits each: the first two words of Philox4x32-10, key = seed, counter = (position, 0)."""
    words = positions.astype(np.uint64)
    zeros = np.zeros_like(words)
    low, high, _, _ = philox((words & _LOW, words >> _HALF, zeros, zeros), (seeds & _LOW, seeds >> _HALF))
    return low | (high << _HALF)


def philox(counter: Words, key: tuple[UInt64Array, UInt64Array]) -> Words:
    """Philox4x32-10 of N counters of four words, and N keys of two: each word 32 bits, in a uint64 array (N,)."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # 32 x 32 bits: exact in 64
        a, b, c, d = (q >> _HALF) ^ b ^ k, q & _LOW, (p >> _HALF) ^ d ^ m, p & _LOW
        k, m = (k + _WEYL[0]) & _LOW, (m + _WEYL[1]) & _LOW
    return a, b, c, d


def below(total: Int64Array, random: UInt64Array) -> Int64Array:
    """(N,) floor(random * total / 2**64): uniform in [0, total). total (N,), not negative.

    By halves of 32 bits, because numpy has no 128-bit product.
    """
    r_low, r_high = random & _LOW, random >> _HALF
    t_low, t_high = total.astype(np.uint64) & _LOW, total.astype(np.uint64) >> _HALF
    middle = r_high * t_low + (r_low * t_low >> _HALF)
    carried = r_low * t_high + (middle & _LOW)
    return (r_high * t_high + (middle >> _HALF) + (carried >> _HALF)).astype(np.int64)
