"""What the network needs computed, as a Protocol: `native_kernels` is C++ and `cpu_kernels` torch on the CPU,
`cuda_kernels` launches `cuda/`.

The network (`model.transformer`) calls the coarse methods, `queries` and `feed_forward`. Their plain form stands here
and composes the others, each of which is one kernel on a GPU and in C++, and a handful of torch operators on the CPU;
an implementation that has fewer kernels for the same replaces them.

The residual stream is x + residual, or x alone where residual is None: an addition waits for the norm that follows it,
because the two are one kernel.
"""

from typing import Protocol, TypeVar

from torch import Tensor

from model.parameters import LayerParameters, Linear, Parameters

Step = TypeVar("Step", contravariant=True)
"""All that one step's kernels read besides weights and pool: each implementation has its own class (`CpuStep`)."""

SCORED_AT_ONCE = 256
"""Places that go through the output matrix together: 156 MB of logits for 152k tokens."""


class Kernels(Protocol[Step]):
    """One object per executor; it knows the pool and the network's sizes. A result may be overwritten by the next call
    of the same method, so a caller uses one before it asks for another.
    """

    def prepare(self, parameters: Parameters) -> None:
        """Bring the weights into the form that `linear` likes best. Once, before the first step; replaces them in
        place.
        """
        ...

    def embed(self, embedding: Tensor, step: Step) -> Tensor:
        """The rows of `embedding` (V, hidden) for the step's token ids: (T, hidden)."""
        ...

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """(T, inputs) -> (T, outputs), or whatever of it this implementation's `rms_norm` and `append` take."""
        ...

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(normed, sum), both (T, hidden): sum = x + residual (or x), normed = weight * sum / rms(sum). fp32 inside."""
        ...

    def append(self, qkv: Tensor, layer: int, q_norm: Tensor | None, k_norm: Tensor | None, step: Step) -> Tensor:
        """Split qkv (T, (H + 2 KH) D), normalise (if given) and rotate queries and keys, write keys and values of
        `layer` into their frames, finite (kv_pool's NaN rule). Returns the queries, (T, H, D).
        """
        ...

    def attention(self, q: Tensor, layer: int, step: Step) -> Tensor:
        """Causal attention of q (T, H, D) over the frames of each token's row. Returns (T, H * D)."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: (T, 2 I) -> (T, I)."""
        ...

    def gated(self, x: Tensor, gate_up: Linear) -> Tensor:
        """silu(gate) * up of a product: (T, hidden) -> (T, I)."""
        return self.silu_mul(self.linear(x, gate_up))

    def last_rows(self, x: Tensor, residual: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """After the last layer's attention: what the rest of the network is computed from, of x (T, H D) and the stream
        `residual` (T, hidden). All rows, or only those of tokens whose logits the step wants, one a sequence.
        """
        return x, residual

    # --- parts of a layer

    def queries(
        self, x: Tensor, residual: Tensor | None, layer: LayerParameters, index: int, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Norm, project, rotate, write keys and values. Returns the queries (T, H, D), and the stream for
        `feed_forward` to add to.
        """
        x, residual = self.rms_norm(x, residual, layer.input_norm)  # (T, hidden) both
        qkv = self.linear(x, layer.qkv)  # (T, (H + 2 KH) D)
        return self.append(qkv, index, layer.q_norm, layer.k_norm, step), residual

    def feed_forward(
        self, x: Tensor, residual: Tensor, layer: LayerParameters, step: Step
    ) -> tuple[Tensor, Tensor | None]:
        """Attention's output matrix over x (T, H D), then the feed-forward network, each added to the stream
        `residual`. Returns the stream.
        """
        x, residual = self.rms_norm(self.linear(x, layer.output), residual, layer.mlp_norm)  # (T, hidden) both
        return self.linear(self.gated(x, layer.gate_up), layer.down), residual  # (T, hidden) both
