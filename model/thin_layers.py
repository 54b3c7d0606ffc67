"""The layers of a step with few tokens, on a GPU: five kernels a layer, whose time is that of reading the weights.

    embed ─▶ [norm, qkv, rotate, write K V] ─▶ attention ─▶ [output, +] ─▶ [norm, gate, up, silu] ─▶ [down, +] ─▶ …

With norms of queries and keys there are six: a head's norm needs the whole head, so `kv_append` stays a kernel. Where
something else is as fast it does the work: cuBLAS a large head; and of a network of large matrices steps of more than
one token on Hopper (BatchLinear, then cuBLAS), of more than eight elsewhere (cuBLAS).

Owns the residual stream of such a step, and the sums of its squares that every addition leaves for the norm after it
(cuda/kernels/thin_linear.cu). Bits differ from those of the other path; what a row gets depends on no other row.
"""

import torch
from torch import Tensor

from cuda.frames import FramePool
from cuda.launch import KernelLoader
from cuda.scatter import DeviceState
from cuda.thin_linear import (
    ThinAdd,
    ThinAppend,
    ThinEmbed,
    ThinGate,
    ThinLogits,
    ThinProduct,
    ThinWorkspace,
    is_streamed,
    squares_of,
)
from model.config import ModelConfig
from model.parameters import LayerParameters

CUBLAS_BYTES = 64 << 20
"""A head that is larger is left to cuBLAS."""

ROWS, LARGE_ROWS, ALONE = 16, 8, 1
"""Steps of so many tokens are faster this way than by cuBLAS: of networks whose gate has at most CUBLAS_BYTES, and of
those whose gate is larger, and streamed (measured: decisions 0009, 0014, 0025). ALONE: than by BatchLinear (0030)."""


def useful_rows(config: ModelConfig, capability: int, *, beside_batches: bool) -> int:
    """The largest step of a network that should take ThinLayers on a device of such capability; 0: none.

    beside_batches: other steps of tens of tokens take BatchLinear.
    """
    if not is_large(config):
        return ROWS
    if not is_streamed(capability, 2 * config.intermediate, config.hidden):
        return 0
    return ALONE if beside_batches else LARGE_ROWS


def is_large(config: ModelConfig) -> bool:
    """Whether a network's largest matrix of a layer has more than CUBLAS_BYTES, in 16 bits."""
    return not _is_small(2 * config.intermediate, config.hidden)


def _is_small(outputs: int, inputs: int) -> bool:
    return 2 * outputs * inputs <= CUBLAS_BYTES


class ThinLayers:
    """For one model, pool and stream; at most `rows` tokens in a step. 16-bit parameters."""

    def __init__(
        self,
        config: ModelConfig,
        loader: KernelLoader,
        pool: FramePool,
        state: DeviceState,
        cosines: Tensor,
        sines: Tensor,
        *,
        rows: int,
    ) -> None:
        c, dtype, device = config, pool.layout.dtype, state.upload.device
        self.rows, self._state = rows, state
        work, sizes = ThinWorkspace(device), {"rows": rows}
        normed = {"epsilon": c.norm_eps, **sizes}
        qkv = (c.heads + 2 * c.kv_heads) * c.head_dim
        self._embed = ThinEmbed(loader, dtype, c.hidden)
        self._append: ThinAppend | None = None
        if c.qk_norm:
            self._product = ThinProduct(loader, work, dtype, qkv, c.hidden, **normed)
        else:
            self._append = ThinAppend(loader, work, pool, c.heads, c.hidden, cosines, sines, **normed)
        self._output = ThinAdd(loader, work, dtype, c.hidden, c.heads * c.head_dim, **sizes)
        self._gate = ThinGate(loader, work, dtype, c.intermediate, c.hidden, **normed)
        self._down = ThinAdd(loader, work, dtype, c.hidden, c.intermediate, **sizes)
        self._logits: ThinLogits | None = None
        if _is_small(c.vocabulary, c.hidden):
            self._logits = ThinLogits(loader, work, dtype, c.vocabulary, c.hidden, **sizes)
        self._residual = torch.empty(rows, c.hidden, dtype=dtype, device=device)
        self._squares = torch.empty(rows * squares_of(c.hidden), dtype=torch.float32, device=device)

    def embed(self, stream: int, embedding: Tensor, tokens: int) -> Tensor:
        """The residual stream of the step's tokens: (T, hidden)."""
        residual, squares = self._stream_of(tokens)
        self._embed(stream, embedding, self._state.token_ids[:tokens], residual, squares)
        return residual

    def project(self, stream: int, layer: LayerParameters, out: Tensor) -> None:
        """out (T, (H + 2 KH) D): norm and qkv, for `kv_append` to go on with."""
        residual, squares = self._stream_of(len(out))
        self._product(stream, residual, (layer.input_norm, squares), layer.qkv.weight, layer.qkv.bias, out)

    def append(self, stream: int, layer: LayerParameters, index: int, queries: Tensor) -> None:
        """queries (T, H D): norm, qkv, rotation; keys and values go into their frames."""
        assert self._append is not None, "this network normalizes queries and keys: project, then kv_append"
        state, tokens = self._state, len(queries)
        residual, squares = self._stream_of(tokens)
        self._append(
            stream, index, residual, (layer.input_norm, squares), layer.qkv.weight, layer.qkv.bias, queries,
            state.token_rows[:tokens], state.positions[:tokens], state.page_tables, state.failed,
        )  # fmt: skip

    def feed_forward(self, stream: int, mixed: Tensor, layer: LayerParameters, gated: Tensor) -> Tensor:
        """The residual stream after the layer. mixed (T, H D) of the attention; gated (T, I) is written."""
        residual, squares = self._stream_of(len(mixed))
        self._output(stream, mixed, layer.output.weight, layer.output.bias, residual, squares)
        up = layer.gate_up
        self._gate(stream, residual, (layer.mlp_norm, squares), up.weight, up.bias, gated)
        self._down(stream, gated, layer.down.weight, layer.down.bias, residual, squares)
        return residual

    def logits(self, stream: int, hidden: Tensor, places: Tensor, weight: Tensor, out: Tensor) -> bool:
        """out (S, V) float32, of the tokens at `places` (S,) int32. False: left to cuBLAS, nothing was done."""
        if self._logits is None:
            return False
        self._logits(stream, hidden, places, weight, out)
        return True

    def _stream_of(self, tokens: int) -> tuple[Tensor, Tensor]:
        width = self._residual.shape[1]
        return self._residual[:tokens], self._squares[: tokens * squares_of(width)].view(tokens, -1)
