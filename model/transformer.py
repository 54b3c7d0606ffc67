"""The network, top to bottom, for every architecture and device: Llama, and what Mistral, Qwen2 and Qwen3 change in it.

T tokens of all Sequences of a step, packed. Keys and values live in the frames of the pool: there is no other cache.
What differs between architectures is in the parameters (a bias or a norm is there or not), never an `if` on a name.

    x ─ norm ─ qkv ─ (norm) rotate, write K V ─ attention ─ output ─ + ─ norm ─ gate, up ─ silu ─ down ─ + ─▶ next layer
     └──────────────────────── residual ─────────────────────────────┘ └─────────── residual ──────────┘
"""

from typing import TypeVar

from torch import Tensor

from model.kernels import Kernels
from model.parameters import Parameters

Step = TypeVar("Step")


def forward(parameters: Parameters, step: Step, kernels: Kernels[Step]) -> Tensor:
    """Run all layers over a step's tokens; writes their keys and values. Returns the last hidden states (T, hidden)."""
    residual = None
    x = kernels.embed(parameters.embedding, step)  # (T, hidden)
    for index, layer in enumerate(parameters.layers):
        x, residual = kernels.rms_norm(x, residual, layer.input_norm)  # (T, hidden) both
        qkv = kernels.linear(x, layer.qkv)  # (T, (H + 2 KH) D)
        q = kernels.append(qkv, index, layer.q_norm, layer.k_norm, step)  # (T, H, D)
        x = kernels.attention(q, index, step)  # (T, H D)
        x = kernels.linear(x, layer.output)  # (T, hidden)
        x, residual = kernels.rms_norm(x, residual, layer.mlp_norm)  # (T, hidden) both
        gate_up = kernels.linear(x, layer.gate_up)  # (T, 2 I)
        x = kernels.linear(kernels.silu_mul(gate_up), layer.down)  # (T, hidden)
    x, _ = kernels.rms_norm(x, residual, parameters.norm)  # (T, hidden)
    return x


def logits(parameters: Parameters, hidden: Tensor, kernels: Kernels[Step]) -> Tensor:
    """The output matrix over some rows of `hidden` (N, hidden). Returns (N, V) float32."""
    return kernels.linear(hidden, parameters.head).float()  # sampling computes in float32
