"""The network's kernels on a GPU: the launchers of `cuda/`, cuBLAS through torch for the matrices, and their buffers.

Steps of few tokens are bound by reading the weights and by the number of kernels: `ThinLayers` has fewer. Those of tens
of tokens of a network of large matrices are bound by the weights alone: `BatchLinear` reads them faster.

Every result lives in a buffer that is allocated once, for the largest step: the memory a step needs is known when the
pool is sized, and a captured graph's addresses stay valid.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cuda.batch_linear import TOKENS as BATCH_SIZES
from cuda.batch_linear import BatchLinear
from cuda.frames import FramePool
from cuda.kv_append import KvAppend
from cuda.launch import KernelLoader
from cuda.paged_attention_f32 import PagedAttentionF32
from cuda.paged_decode import PagedDecode
from cuda.paged_prefill import PagedPrefill
from cuda.rms_norm import RmsNorm
from cuda.scatter import DeviceState
from cuda.shared_prefix import SharedPrefix
from cuda.silu_mul import SiluMul
from model.config import ModelConfig
from model.kernels import Kernels
from model.parameters import LayerParameters, Linear, Parameters
from model.rope import inverse_frequencies
from model.thin_layers import ThinLayers, is_large, useful_rows

BATCH_TOKENS = BATCH_SIZES[-1]
"""Products of at most so many tokens of a network of large matrices are BatchLinear's where the step does not take
ThinLayers; with more cuBLAS is as fast or faster (measured: docs/decisions/0030)."""


@dataclass(frozen=True, slots=True)
class CudaStep:
    """The sizes of one step; its arrays are those of the DeviceState. Decodes come first, one token each."""

    stream: int  # raw handle: also of a stream that is being captured
    sequences: int  # with padding
    tokens: int  # with padding
    decodes: int  # leading sequences that decode, with padding
    prefill_blocks: int  # work items of the prefill kernel; 0: nobody prefills
    has_groups: bool = False  # decodes begin with what CudaKernels.shared_prefix holds
    weighs: bool = True  # a row may sample by more than its largest logits
    is_scored: bool = False  # logits are wanted of more than each sequence's last token


class CudaKernels(Kernels[CudaStep]):
    """`model.kernels.Kernels` over a FramePool. One step at a time, on one stream."""

    def __init__(
        self,
        config: ModelConfig,
        loader: KernelLoader,
        pool: FramePool,
        state: DeviceState,
        *,
        thin_rows: int | None = None,
    ) -> None:
        """thin_rows: steps of at most so many tokens take ThinLayers; 0: none does; None: those that gain by it."""
        self._config = config
        self._state = state
        self._stream = 0  # of the step that was planned last
        dtype, device, tokens = pool.layout.dtype, state.upload.device, state.max_tokens
        frequencies, scale = inverse_frequencies(config.rope, config.head_dim)
        angles = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * frequencies  # (positions, D / 2)
        cosines, sines = ((f(angles) * scale).to(device).contiguous() for f in (torch.cos, torch.sin))
        self._append = KvAppend(loader, pool, config.heads, cosines, sines, config.norm_eps)
        self._norm = RmsNorm(loader, dtype, config.hidden, config.norm_eps)
        self._silu_mul = SiluMul(loader, dtype, config.intermediate)
        self._is_exact = dtype == torch.float32
        self.shared_prefix: SharedPrefix | None = None
        takes_batches = is_large(config) and BatchLinear.is_possible(loader, dtype)
        self._thin: ThinLayers | None = None
        if thin_rows is None:
            thin_rows = useful_rows(config, loader.capability, beside_batches=takes_batches)
        if thin_rows and not self._is_exact:
            self._thin = ThinLayers(config, loader, pool, state, cosines, sines, rows=thin_rows)
        if self._is_exact:
            self._exact = PagedAttentionF32(loader, pool, config.heads)
        else:
            self._decode = PagedDecode(loader, pool, config.heads)
            if SharedPrefix.is_possible(loader, dtype):
                self.shared_prefix = SharedPrefix(loader, pool, config.heads, state.max_sequences)
            self._prefill = PagedPrefill(loader, pool, config.heads, tokens)

        def buffer(width: int) -> Tensor:
            return torch.empty(tokens, width, dtype=dtype, device=device)

        self._embedded, self._normed = buffer(config.hidden), buffer(config.hidden)
        self._queries, self._mixed = buffer(config.heads * config.head_dim), buffer(config.heads * config.head_dim)
        self._gated = buffer(config.intermediate)
        widths = {(config.heads + 2 * config.kv_heads) * config.head_dim, config.hidden, 2 * config.intermediate}
        self._products = {width: buffer(width) for width in widths}
        self._last = torch.empty(state.max_sequences, config.hidden, dtype=dtype, device=device)
        self._in_order = torch.arange(state.max_sequences, dtype=torch.int32, device=device)
        self._last_residual = torch.empty_like(self._last)
        self._last_mixed = torch.empty(state.max_sequences, self._mixed.shape[1], dtype=dtype, device=device)
        self._logits = torch.empty(state.max_sequences, config.vocabulary, dtype=torch.float32, device=device)
        self._batch: BatchLinear | None = None
        if takes_batches:
            inputs = (self._normed, self._mixed, self._gated, self._last_mixed)
            outputs = max(config.hidden, (config.heads + 2 * config.kv_heads) * config.head_dim)
            self._batch = BatchLinear(
                loader, dtype, device, weights=4 * config.layers, inputs=len(inputs), outputs=outputs
            )
            for each in inputs:
                self._batch.keep_input(each)

    def plan(self, step: CudaStep) -> None:
        """Divide the step's attention among thread blocks: once, after `scatter`, before the first layer."""
        state = self._state
        self._stream = step.stream
        if self._is_exact:
            return
        if step.decodes:
            rows, lengths = state.rows[: step.decodes], state.decode_lengths[: step.decodes]
            prefixes = self.shared_prefix.prefixes if self.shared_prefix and step.has_groups else None
            self._decode.plan(step.stream, state.page_tables, rows, lengths, prefixes=prefixes)
        if step.prefill_blocks:
            tokens, lengths = state.prefill_tokens[: step.sequences], state.lengths[: step.sequences]
            self._prefill.plan(step.stream, tokens, lengths, step.prefill_blocks)

    def prefill_blocks(self, tokens: int, sequences: int) -> int:
        """Work items that are enough for `tokens` query tokens of `sequences` that prefill."""
        return 0 if self._is_exact else self._prefill.max_blocks(tokens, sequences)

    # --- model.kernels.Kernels

    def prepare(self, parameters: Parameters) -> None:
        """Weights stay as they are, and where they are."""
        if self._batch is not None:
            for layer in parameters.layers:
                for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                    self._batch.keep(linear.weight, gate=linear is layer.gate_up)

    def load_products(self, parameters: Parameters) -> None:
        """Multiply any rows by one layer's matrices and the head, as many as steps have. cuBLAS loads a kernel when it
        is used for the first time, which needs memory of the device that may be another's later.
        """
        layer, tokens = parameters.layers[0], self._state.max_tokens
        inputs = [(layer.qkv, self._normed), (layer.output, self._mixed), (layer.down, self._gated)]
        for rows in (1, 2, 4, 8, *range(16, min(512, tokens), 16), *range(512, tokens, 128), tokens):
            for linear, rows_in in inputs:
                self.linear(rows_in[:rows], linear)
            self.gated(self._normed[:rows], layer.gate_up)
            if rows <= self._state.max_sequences:
                self.logits_at(self._normed, parameters, self._in_order[:rows])

    def embed(self, embedding: Tensor, step: CudaStep) -> Tensor:
        if (thin := self._thin_for(step.tokens)) is not None:
            return thin.embed(step.stream, embedding, step.tokens)
        out = self._embedded[: step.tokens]
        return torch.index_select(embedding, 0, self._state.token_ids[: step.tokens], out=out)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Or (P, T, outputs) float32, which give it in sum: what `rms_norm` and `append` take, too."""
        if (batch := self._batch_for(len(x))) is not None:
            return batch.product(self._stream, x, linear.weight, linear.bias)
        out = self._products[linear.weight.shape[0]][: len(x)]
        if linear.bias is None:
            return torch.mm(x, linear.weight.t(), out=out)
        return torch.addmm(linear.bias, x, linear.weight.t(), out=out)

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        out = self._normed[: x.shape[-2]]
        self._norm(self._stream, x, residual, weight, out)
        return out, x if residual is None else residual  # the kernel adds x to the residual in place

    def append(self, qkv: Tensor, layer: int, q_norm: Tensor | None, k_norm: Tensor | None, step: CudaStep) -> Tensor:
        state = self._state
        queries = self._queries[: step.tokens]
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        rows, positions = state.token_rows[: step.tokens], state.positions[: step.tokens]
        self._append(step.stream, layer, qkv, queries, norms, rows, positions, state.page_tables, state.failed)
        return queries

    def attention(self, q: Tensor, layer: int, step: CudaStep) -> Tensor:
        state = self._state
        out = self._mixed[: step.tokens]
        if self._is_exact:
            rows, positions = state.token_rows[: step.tokens], state.positions[: step.tokens]
            self._exact(step.stream, layer, q, out, state.page_tables, rows, positions)
            return out
        if step.decodes:
            parts = None
            if self.shared_prefix and step.has_groups:
                self.shared_prefix(step.stream, layer, q, state.page_tables)
                parts = self.shared_prefix.parts
            self._decode(step.stream, layer, q, out, state.page_tables, step.decodes, prefix_parts=parts)
        if step.prefill_blocks:
            rows, lengths = state.rows[: step.sequences], state.lengths[: step.sequences]
            starts = state.query_starts[: step.sequences + 1]
            self._prefill(step.stream, layer, q, out, state.page_tables, rows, lengths, starts, step.prefill_blocks)
        return out

    def last_rows(self, x: Tensor, residual: Tensor, step: CudaStep) -> tuple[Tensor, Tensor]:
        """Of the last layer only keys and values are wanted of all: 3 % less to compute for a prompt of 8B."""
        if not self._keeps_last(step):
            return x, residual
        places = self._state.last_query[: step.sequences]
        kept = self._last_mixed[: step.sequences], self._last_residual[: step.sequences]
        torch.index_select(x, 0, places, out=kept[0])
        torch.index_select(residual, 0, places, out=kept[1])
        return kept

    def _keeps_last(self, step: CudaStep) -> bool:
        return step.tokens > step.sequences and not step.is_scored and self._thin_for(step.tokens) is None

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = self._gated[: len(gate_up)]
        self._silu_mul(self._stream, gate_up, out)
        return out

    def gated(self, x: Tensor, gate_up: Linear) -> Tensor:
        if (batch := self._batch_for(len(x))) is None:
            return super().gated(x, gate_up)
        out = self._gated[: len(x)]
        batch.gated(self._stream, x, gate_up.weight, gate_up.bias, out)
        return out

    def queries(
        self, x: Tensor, residual: Tensor | None, layer: LayerParameters, index: int, step: CudaStep
    ) -> tuple[Tensor, Tensor]:
        if (thin := self._thin_for(step.tokens)) is None:
            return super().queries(x, residual, layer, index, step)
        if layer.q_norm is None:
            queries = self._queries[: step.tokens]
            thin.append(step.stream, layer, index, queries)
            return queries, x
        qkv = self._products[layer.qkv.weight.shape[0]][: step.tokens]
        thin.project(step.stream, layer, qkv)
        return self.append(qkv, index, layer.q_norm, layer.k_norm, step), x

    def feed_forward(
        self, x: Tensor, residual: Tensor, layer: LayerParameters, step: CudaStep
    ) -> tuple[Tensor, Tensor | None]:
        if (thin := self._thin_for(step.tokens)) is None:
            return super().feed_forward(x, residual, layer, step)
        return thin.feed_forward(step.stream, x, layer, self._gated[: step.tokens]), None

    def _thin_for(self, rows: int) -> ThinLayers | None:
        return self._thin if self._thin is not None and rows <= self._thin.rows else None

    def _batch_for(self, rows: int) -> BatchLinear | None:
        return self._batch if rows <= BATCH_TOKENS else None

    # --- the end of a step

    def logits(self, hidden: Tensor, parameters: Parameters, step: CudaStep) -> Tensor:
        """(sequences, V) float32, of each sequence's last token."""
        out = self._logits[: step.sequences]
        places = (self._in_order if self._keeps_last(step) else self._state.last_query)[: step.sequences]
        thin = self._thin_for(step.sequences)
        if thin is not None and thin.logits(step.stream, hidden, places, parameters.head.weight, out):
            return out
        return self.logits_at(hidden, parameters, places)

    def latest_logits(self, sequences: int) -> Tensor:
        """(sequences, V): the first rows of what `logits` has written last."""
        return self._logits[:sequences]

    def logits_at(self, hidden: Tensor, parameters: Parameters, places: Tensor) -> Tensor:
        """(N, V) float32, of the tokens at `places` (N,) int32, no more than the sequences of a step."""
        last, out = self._last[: len(places)], self._logits[: len(places)]
        torch.index_select(hidden, 0, places, out=last)
        weight = parameters.head.weight.t()
        if self._is_exact:
            return torch.mm(last, weight, out=out)
        return torch.mm(last, weight, out_dtype=torch.float32, out=out)
