"""The network, top to bottom, for every architecture and device: Llama, and what Mistral, Qwen2 and Qwen3 change in it.

T tokens of all Sequences of a step, packed. Keys and values live in the frames of the pool: there is no other cache.
What differs between architectures is in the parameters (a bias or a norm is there or not), never an `if` on a name.

    x ─ norm ─ qkv ─ (norm) rotate, write K V ─ attention ─ output ─ + ─ norm ─ gate, up ─ silu ─ down ─ + ─▶ next layer
     └──────────────────────── residual ─────────────────────────────┘ └─────────── residual ──────────┘
          `queries` ······················ `attention`   `feed_forward` ································
"""

from typing import TypeVar

from torch import Tensor

from model.kernels import Kernels
from model.parameters import Parameters

Step = TypeVar("Step")


def forward(parameters: Parameters, step: Step, kernels: Kernels[Step]) -> Tensor:
    """Run all layers over a step's tokens; writes their keys and values. Returns the last hidden states (T, hidden), or
    only those that `Kernels.last_rows` keeps.
    """
    x: Tensor = kernels.embed(parameters.embedding, step)  # (T, hidden)
    residual: Tensor | None = None  # the stream is x + residual: see model.kernels
    for index, layer in enumerate(parameters.layers):
        q, residual = kernels.queries(x, residual, layer, index, step)  # (T, H, D), keys and values are written
        x = kernels.attention(q, index, step)  # (T, H D)
        if index == len(parameters.layers) - 1:
            x, residual = kernels.last_rows(x, residual, step)
        x, residual = kernels.feed_forward(x, residual, layer, step)  # (T, hidden)
    x, _ = kernels.rms_norm(x, residual, parameters.norm)  # (T, hidden)
    return x


def logits(parameters: Parameters, hidden: Tensor, kernels: Kernels[Step]) -> Tensor:
    """The output matrix over some rows of `hidden` (N, hidden). Returns (N, V) float32."""
    return kernels.linear(hidden, parameters.head).float()  # sampling computes in float32
