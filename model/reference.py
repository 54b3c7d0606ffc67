"""Paged attention and RMS norm written for reading, in float64 and loops: the oracle of the CPU and the CUDA kernels.

Nothing at run time uses this file; tests do.
"""

import numpy as np
import numpy.typing as npt

from mm.addresses import Int32Array

Array = npt.NDArray[np.float64]


def paged_attention(
    q: Array,
    keys_and_values: Array,
    page_tables: Int32Array,
    query_starts: Int32Array,
    lengths: Int32Array,
) -> Array:
    """Causal attention of packed queries over the frames of their Sequences, one layer.

    q (T, H, D); keys_and_values (F, 2, KH, page_size, D); page_tables (S, P); query_starts (S + 1,); lengths (S,):
    keys of each row, of which its last query is the last. Returns (T, H, D).
    """
    _, heads, dim = q.shape
    _, _, kv_heads, page_size, _ = keys_and_values.shape
    out = np.zeros(q.shape)
    for row, length in enumerate(lengths):
        first, last = query_starts[row], query_starts[row + 1]
        for token in range(first, last):
            position = length - (last - token)  # the row's last query stands at position length - 1
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                scores = np.empty(position + 1)
                values = np.empty((position + 1, dim))
                for key in range(position + 1):
                    frame, offset = page_tables[row, key // page_size], key % page_size
                    scores[key] = q[token, head] @ keys_and_values[frame, 0, kv_head, offset] / np.sqrt(dim)
                    values[key] = keys_and_values[frame, 1, kv_head, offset]
                weights = np.exp(scores - scores.max())
                out[token, head] = weights / weights.sum() @ values
    return out


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """weight * x / sqrt(mean(x²) + eps), over the last axis."""
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
