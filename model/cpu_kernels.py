"""The network's kernels in torch, for the CPU: plain operators, arranged so that no Python loop runs over Sequences x
layers in decode. They serve where `model.native_kernels` cannot be compiled, and for float16.

**Paged attention.** Decodes of Sequences of like length go together: one gather brings the frames of all their rows
into one buffer, (2, S, KH, N, D), and one scaled_dot_product_attention reads it. The query heads that share a key head
stand as G query positions of it, so keys are neither repeated nor read twice. The buffer of one layer is small enough
to stay in the cache between gather and use. A prefill chunk is one such pair of calls a row.

**Linears.** Where oneDNN has a packed form for the dtype, weights are repacked once (`prepare`): a decode step is
bound by reading them, and packed weights are read at the speed of memory.

The oracle of both is `model.reference`.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mm.addresses import BoolArray, Int32Array, Int64Array, pages_for
from model.batch import ForwardBatch
from model.config import ModelConfig
from model.kernels import Kernels
from model.kv_pool import KvPool
from model.parameters import Linear, Parameters
from model.rope import inverse_frequencies
from model.transformer import forward, logits


@dataclass(slots=True)
class _Attention:
    """Rows whose attention is one call: decodes of like length, or one prefill chunk."""

    queries: Tensor | None  # (T',) int64: which of the step's T tokens; None: all, in their order
    rows: int
    decodes: bool  # each row has one query
    keys: int  # N: keys of the longest row
    gather: tuple[Tensor, ...]  # per layer, (2 * rows * KH * pages,) rows of KvPool.head_pages
    mask: Tensor | None  # added to the scores; None: plainly causal


@dataclass(slots=True)
class CpuStep:
    """A ForwardBatch and what all layers share of it."""

    batch: ForwardBatch
    cos: Tensor  # (T, 1, D) float32
    sin: Tensor  # (T, 1, D) float32, negative for the first half of a head
    places: tuple[Tensor, ...]  # per layer, (T * 2 * KH,) rows of KvPool.vectors to write
    attention: list[_Attention]
    suspect: Tensor  # (T, 2, KH, D): 0, but NaN where a key or value of any layer so far was not finite


class CpuKernels(Kernels[CpuStep]):
    """`model.kernels.Kernels` over a KvPool."""

    def __init__(self, config: ModelConfig, pool: KvPool) -> None:
        self._config = config
        self._pool = pool
        self._inverse_frequencies, self._rope_scale = inverse_frequencies(config.rope, config.head_dim)
        self._groups = config.heads // config.kv_heads
        # A frame's neighbour layer lies this many rows on, in KvPool.head_pages and KvPool.vectors.
        self._layer_head_pages = 2 * config.kv_heads
        self._layer_vectors = 2 * config.kv_heads * pool.page_size
        self._vectors, self._head_pages = pool.vectors, pool.head_pages
        self._gathered = self._head_pages[:0]
        self._dtype = pool.data.dtype
        self._norm_eps = torch.tensor(config.norm_eps)
        self._packs = _can_pack(self._dtype)
        self._parameters: Parameters | None = None
        self._hidden = torch.empty(0)  # (T, hidden) of the last step

    # --- Weights -----------------------------------------------------------------------------------------------------

    def prepare(self, parameters: Parameters) -> None:
        """Norms become float32, because torch multiplies bfloat16 by a broadcast vector eight times slower. Every
        matrix is repacked for oneDNN and its plain form released; the embedding stays, it is looked up by row.
        """
        self._parameters = parameters
        parameters.norm = parameters.norm.float()
        for layer in parameters.layers:
            layer.input_norm, layer.mlp_norm = layer.input_norm.float(), layer.mlp_norm.float()
            if layer.q_norm is not None and layer.k_norm is not None:
                layer.q_norm, layer.k_norm = layer.q_norm.float(), layer.k_norm.float()
        if not self._packs:
            return
        for layer in parameters.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                linear.weight = _packed(linear.weight)
        parameters.head.weight = _packed(parameters.head.weight)

    # --- A step ------------------------------------------------------------------------------------------------------

    def compute(self, batch: ForwardBatch, scored: int = 0) -> tuple[Tensor, BoolArray]:
        """Run the network. scored: tokens for which `logits_at` will be called after it.

        Returns ((N, V) float32 logits of the tokens `batch.sampled`; (S,) whether the row failed (`failed_rows`)).
        """
        assert self._parameters is not None, "prepare comes first"
        step = self.step(batch)
        self._hidden = forward(self._parameters, step, self)  # (T, hidden)
        return self.logits_at(batch.sampled), failed_rows(step, self._hidden)

    def logits_at(self, places: Tensor) -> Tensor:
        """(N, V) float32 logits of the tokens `places` (N,) int64 of the last step."""
        assert self._parameters is not None, "prepare comes first"
        return logits(self._parameters, self._hidden[places], self)

    def close(self) -> None:
        """Nothing is held."""

    def embed(self, embedding: Tensor, step: CpuStep) -> Tensor:
        return embedding[step.batch.token_ids]

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        if self._packs:
            return torch.ops.mkldnn._linear_pointwise(x, linear.weight, linear.bias, "none", [], "")
        return F.linear(x, linear.weight, linear.bias)

    # --- Element-wise ------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return self._normed(total, weight), total

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """weight * x / rms(x) over the last axis; weight float32."""
        wide = x.float()
        lengths = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._norm_eps, lengths, lengths, value=1 / x.shape[-1]).rsqrt_()
        return (wide * scale).mul_(weight).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    # --- Keys and values ---------------------------------------------------------------------------------------------

    def append(self, qkv: Tensor, layer: int, q_norm: Tensor | None, k_norm: Tensor | None, step: CpuStep) -> Tensor:
        c = self._config
        heads = qkv.view(qkv.shape[0], -1, c.head_dim)  # (T, H + 2 KH, D)
        qk, v = heads.split((c.heads + c.kv_heads, c.kv_heads), dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = qk.split((c.heads, c.kv_heads), dim=1)
            qk = torch.cat((self._normed(q, q_norm), self._normed(k, k_norm)), dim=1)
        wide = qk.float()
        partner = wide.roll(c.head_dim // 2, dims=-1)  # dimension i turns with i + D / 2
        qk = torch.addcmul(wide * step.cos, partner, step.sin).to(qkv.dtype)  # (T, H + KH, D)
        q, k = qk.split((c.heads, c.kv_heads), dim=1)
        kv = torch.stack((k, v), dim=1)  # (T, 2, KH, D)
        step.suspect.add_(kv, alpha=0)  # 0 * infinity and 0 * NaN are NaN
        self._vectors.index_copy_(0, step.places[layer], kv.nan_to_num_(nan=0.0).view(-1, c.head_dim))
        return q

    def attention(self, q: Tensor, layer: int, step: CpuStep) -> Tensor:
        c = self._config
        out = q.new_empty((q.shape[0], c.heads * c.head_dim)) if len(step.attention) > 1 else None
        for part in step.attention:
            keys, values = self._gather(part, layer)
            own = q if part.queries is None else q.index_select(0, part.queries)
            queries = own.unflatten(1, (c.kv_heads, self._groups))  # (T', KH, G, D)
            if part.decodes:
                mixed = F.scaled_dot_product_attention(queries, keys, values, part.mask)  # (S, KH, G, D)
            else:
                heads = (c.kv_heads, self._groups, part.keys, c.head_dim)  # of one row: kv heads take the batch's place
                mixed = F.scaled_dot_product_attention(
                    queries.permute(1, 2, 0, 3),
                    keys[0].unsqueeze(1).expand(heads),
                    values[0].unsqueeze(1).expand(heads),
                    part.mask,
                    is_causal=part.mask is None,
                ).permute(2, 0, 1, 3)  # (T', KH, G, D)
            mixed = mixed.reshape(-1, c.heads * c.head_dim)
            if out is None or part.queries is None:
                return mixed
            out.index_copy_(0, part.queries, mixed)
        assert out is not None, "a step has at least one token"
        return out

    def _gather(self, part: _Attention, layer: int) -> tuple[Tensor, Tensor]:
        """The rows' keys and values of one layer, each (rows, KH, N, D), in the buffer that the next call reuses."""
        index = part.gather[layer]
        if self._gathered.shape[0] < len(index):
            self._gathered = torch.empty((len(index), self._head_pages.shape[1]), dtype=self._dtype)
        buffer = self._gathered[: len(index)]
        torch.index_select(self._head_pages, 0, index, out=buffer)
        c = self._config
        kv = buffer.view(2, part.rows, c.kv_heads, -1, c.head_dim)[:, :, :, : part.keys]
        return kv[0], kv[1]

    # --- Once a step -------------------------------------------------------------------------------------------------

    def step(self, batch: ForwardBatch) -> CpuStep:
        """What all layers share: angles, places to write, frames to gather, masks."""
        c = self._config
        angles = batch.positions.float()[:, None] * self._inverse_frequencies  # (T, D / 2)
        cos, sin = angles.cos() * self._rope_scale, angles.sin() * self._rope_scale  # (T, D / 2)
        heads = torch.arange(2 * c.kv_heads)
        places = (batch.frames[:, None] * c.layers * self._layer_head_pages + heads) * self._pool.page_size
        tokens = len(batch.token_ids)
        return CpuStep(
            batch=batch,
            cos=torch.cat((cos, cos), dim=-1)[:, None],
            sin=torch.cat((-sin, sin), dim=-1)[:, None],
            places=self._of_each_layer(places + batch.offsets[:, None], self._layer_vectors),
            attention=self._plan_attention(batch),
            suspect=torch.zeros((tokens, 2, c.kv_heads, c.head_dim), dtype=self._dtype),
        )

    def _of_each_layer(self, first: Tensor, stride: int) -> tuple[Tensor, ...]:
        """The index `first` of layer 0, flat, and those of all layers: each lies `stride` rows after the one before."""
        return (first.reshape(-1) + torch.arange(self._config.layers)[:, None] * stride).unbind()

    def _plan_attention(self, batch: ForwardBatch) -> list[_Attention]:
        parts = []
        groups = self._like_lengths(batch.lengths[: batch.decodes])
        alone = len(groups) + len(batch.lengths) - batch.decodes == 1
        for rows in groups:
            lengths = batch.lengths[rows]
            keys = int(lengths.max())
            too_far = torch.arange(keys) >= torch.from_numpy(lengths)[:, None]  # (S, N)
            bias = torch.zeros(too_far.shape, dtype=self._dtype).masked_fill_(too_far, float("-inf"))
            parts.append(
                _Attention(
                    queries=None if alone else torch.from_numpy(rows),
                    rows=len(rows),
                    decodes=True,
                    keys=keys,
                    gather=self._gather_index(batch.page_tables[rows], lengths),
                    mask=bias[:, None, None].expand(len(rows), 1, self._groups, keys),
                )
            )
        for row in range(batch.decodes, len(batch.lengths)):
            queries = None if alone else torch.arange(int(batch.query_starts[row]), int(batch.query_starts[row + 1]))
            start, keys = int(batch.starts[row]), int(batch.lengths[row])
            mask: Tensor | None = None
            if start:
                later = torch.arange(keys) > torch.arange(start, keys)[:, None]  # (T', N)
                mask = torch.zeros(later.shape, dtype=self._dtype).masked_fill_(later, float("-inf"))
            index = self._gather_index(batch.page_tables[row : row + 1], batch.lengths[row : row + 1])
            parts.append(_Attention(queries, rows=1, decodes=False, keys=keys, gather=index, mask=mask))
        return parts

    def _like_lengths(self, lengths: Int32Array) -> list[Int64Array]:
        """Decode rows in groups, longest first. A group ends where filling the next row up to the group's longest would
        bring its padding to more than a call of its own costs.
        """
        if not len(lengths):
            return []
        order = np.argsort(-lengths, kind="stable")
        pages = _pages_of(lengths[order], self._pool.page_size).tolist()
        page_bytes = self._layer_vectors * self._config.head_dim * self._dtype.itemsize
        cuts, longest, padding = [], pages[0], 0
        for place, count in enumerate(pages):
            padding += (longest - count) * page_bytes
            if padding > _PADDING_BYTES:
                cuts.append(place)
                longest, padding = count, 0
        return np.split(order, cuts) if cuts else [np.arange(len(lengths))]

    def _gather_index(self, page_tables: Int32Array, lengths: Int32Array) -> tuple[Tensor, ...]:
        """Rows of KvPool.head_pages, per layer, ordered (kind, row, kv head, page).

        Rows shorter than the longest are filled up with their own first frame: always theirs, always finite, and
        masked.
        """
        c = self._config
        pages = pages_for(int(lengths.max()), self._pool.page_size)
        used = np.arange(pages) < _pages_of(lengths, self._pool.page_size)[:, None]
        frames = torch.from_numpy(np.where(used, page_tables[:, :pages], page_tables[:, :1]).astype(np.int64))
        kinds = torch.arange(2).view(2, 1, 1, 1) * c.kv_heads
        heads = torch.arange(c.kv_heads).view(1, 1, -1, 1)
        index = frames[None, :, None] * (c.layers * self._layer_head_pages) + kinds + heads
        return self._of_each_layer(index, self._layer_head_pages)


def failed_rows(step: CpuStep, hidden: Tensor) -> BoolArray:
    """(S,) whether any query token of the row went wrong: a key, a value or its last hidden state is not finite.

    hidden (T, hidden): the network's result. What is not finite in any layer stays so in the residual stream.
    """
    bad = hidden.isfinite().all(-1).logical_and_(step.suspect.flatten(1).isfinite().all(-1)).logical_not_()
    return np.logical_or.reduceat(bad.numpy(), step.batch.query_starts[:-1])


def _pages_of(lengths: Int32Array, page_size: int) -> Int32Array:
    """`mm.addresses.pages_for` of an array."""
    return -(-lengths // page_size)


_PADDING_BYTES = 256 << 10
"""Keys and values of one layer that are gathered and masked in the time that one more gather and attention call costs
(40 us, measured on two cores of an EPYC 9004: 1.8 us for a page of 12 KiB)."""


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN takes packed weights of this dtype on this processor at full speed."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


_PACKED_FOR_ROWS = 32
"""The batch size that weights are packed for. Packed for 32 they are as quick at 1, 8 and 512 as packed for those
sizes.
"""


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
