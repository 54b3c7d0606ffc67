"""The network's kernels in C++ (`native/`), for the CPU: recorded once, run with one call a step.

The methods of `model.kernels.Kernels` compute nothing here: each appends an `Operator` to a program and names the
buffer that its result will be in. `transformer.forward` is run over them once; then a step is its arrays and one call,
during which no Python runs, so neither the interpreter nor a front end that holds its lock stands between operators.
It is what a CUDA graph is on a GPU.

**Weights** are kept once, in the order in which the kernels read them (`native/matrix.hpp`), in huge pages: a decode
step reads all of them, and looks up 500 times fewer addresses. Tied embeddings are looked up in that form too.
"""

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mm.addresses import BoolArray
from model.batch import ForwardBatch
from model.config import ModelConfig
from model.kernels import SCORED_AT_ONCE, Kernels
from model.kv_pool import KvPool
from model.parameters import Linear, Parameters
from model.rope import inverse_frequencies
from model.transformer import forward

EMBED, LINEAR, NORM, APPEND, ATTENTION, SILU_MUL, CHECK, TAKE = range(8)  # native/network.hpp: Kind
DTYPES = (torch.float32, torch.bfloat16)


class NetworkSizes(ctypes.Structure):
    """native/network.hpp: Network."""

    _fields_ = [(name, ctypes.c_int64) for name in ("layers", "heads", "kv_heads", "head_dim", "hidden", "page_size")]
    _fields_ += [("norm_eps", ctypes.c_float), ("score_scale", ctypes.c_float), ("pool", ctypes.c_void_p)]


class Step(ctypes.Structure):
    """native/network.hpp: Step."""

    _fields_ = [
        ("tokens", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("samples", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("frames", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("page_tables", ctypes.c_void_p),
        ("pages", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("sampled", ctypes.c_void_p),
        ("failed", ctypes.c_void_p),
    ]


class Operator(ctypes.Structure):
    """native/network.hpp: Operator."""

    _fields_ = [(name, ctypes.c_int32) for name in ("kind", "layer", "of_samples", "wide")]
    _fields_ += [("width", ctypes.c_int64), ("inputs", ctypes.c_int64)]
    _fields_ += [(name, ctypes.c_void_p) for name in ("input", "output", "weight", "weight2", "residual")]


class NativeKernels(Kernels[None]):
    """`model.kernels.Kernels` over a KvPool, as a recorder; `compute` runs what was recorded."""

    def __init__(self, config: ModelConfig, pool: KvPool, library: ctypes.CDLL) -> None:
        """library: `model.native_library.load`. Raises ValueError for a dtype that is not in DTYPES."""
        if pool.data.dtype not in DTYPES:
            raise ValueError(f"the native kernels compute in float32 or bfloat16, not {pool.data.dtype}")
        self._config = config
        self._pool = pool  # its memory is read and written
        self._library = library
        self._declare()
        self._dtype = pool.data.dtype
        self._is_bf16 = int(self._dtype == torch.bfloat16)
        frequencies, self._rope_scale = inverse_frequencies(config.rope, config.head_dim)
        self._inverse_frequencies = frequencies.numpy()
        c = config
        sizes = NetworkSizes(c.layers, c.heads, c.kv_heads, c.head_dim, c.hidden, pool.page_size)
        sizes.norm_eps, sizes.score_scale, sizes.pool = c.norm_eps, c.head_dim**-0.5, pool.data.data_ptr()
        self._engine = library.pagewalk_open(self._is_bf16, ctypes.byref(sizes))
        self._parameters: Parameters | None = None
        self._outputs: dict[int, int] = {}  # of packed weights, by their address
        self._embedding_is_packed = 0
        self._tokens = self._samples = 0  # the largest step that there are buffers for
        self._buffers: dict[Any, Tensor] = {}
        self._recording: list[Operator] = []
        self._program: ctypes.Array[Operator] = (Operator * 0)()
        self._head: ctypes.Array[Operator] = (Operator * 0)()  # its end: the output matrix
        self._network_operators = 0  # operators of the program before those of the head
        self._batch: ForwardBatch | None = None  # of the last step
        self._scores = torch.empty(0)

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._engine:
            self._library.pagewalk_close(self._is_bf16, self._engine)
            self._engine = None

    # --- A step ------------------------------------------------------------------------------------------------------

    def compute(self, batch: ForwardBatch, scored: int = 0) -> tuple[Tensor, BoolArray]:
        """Run the network with as many threads as torch is set to. scored: tokens for which `logits_at` will be called
        after it.

        Returns ((N, V) float32 logits of the tokens `batch.sampled`, valid until the next call; (S,) whether a key, a
        value or the last hidden state of any query token of the row is not finite).
        """
        tokens, samples = len(batch.token_ids), max(len(batch.sampled), min(scored, SCORED_AT_ONCE))
        if tokens > self._tokens or samples > self._samples:  # seldom: sizes double
            self._record_network(_grown(self._tokens, tokens), _grown(self._samples, samples))
        failed = self.run(self._program, batch)
        self._batch = batch
        return self._scores[: len(batch.sampled)], np.logical_or.reduceat(failed, batch.query_starts[:-1])

    def logits_at(self, places: Tensor) -> Tensor:
        """(N, V) float32 logits of the tokens `places` (N,) int64 of the last step, at most SCORED_AT_ONCE; valid until
        the next call.
        """
        assert self._batch is not None, "compute comes first"
        self.run(self._head, self._batch, places)
        return self._scores[: len(places)]

    def run(self, program: "ctypes.Array[Operator]", batch: ForwardBatch, sampled: Tensor | None = None) -> BoolArray:
        """Run a program, with the tokens `sampled` (N,) int64 (None: of the batch) for what it does of samples.

        Returns (T,) whether a token's keys, values or checked rows were not finite.
        """
        tokens, sampled = len(batch.token_ids), batch.sampled if sampled is None else sampled
        token_ids = batch.token_ids.numpy()
        if tokens and not (token_ids.min() >= 0 and token_ids.max() < self._config.vocabulary):
            raise IndexError(f"token ids must be in 0 ... {self._config.vocabulary - 1}")
        angles = batch.positions.numpy().astype(np.float32)[:, None] * self._inverse_frequencies
        scale = np.float32(self._rope_scale)
        arrays = {
            "token_ids": token_ids,
            "frames": batch.frames.numpy(),
            "offsets": batch.offsets.numpy(),
            "cosines": np.cos(angles) * scale,
            "sines": np.sin(angles) * scale,
            "page_tables": np.ascontiguousarray(batch.page_tables, np.int32),
            "lengths": np.ascontiguousarray(batch.lengths, np.int32),
            "query_starts": np.ascontiguousarray(batch.query_starts, np.int32),
            "sampled": sampled.numpy(),
            "failed": np.zeros(tokens, np.bool_),
        }
        step = Step(tokens=tokens, rows=len(batch.lengths), samples=len(sampled), pages=batch.page_tables.shape[1])
        for name, array in arrays.items():
            setattr(step, name, array.ctypes.data)
        threads = torch.get_num_threads()
        self._library.pagewalk_run(self._is_bf16, self._engine, program, len(program), ctypes.byref(step), threads)
        return arrays["failed"]

    def record(self, build: Callable[[], Any], tokens: int, samples: int = 0) -> "ctypes.Array[Operator]":
        """The operators that `build` asks for, with buffers for so many tokens. Ends every earlier program, also where
        there is no memory for the new one.
        """
        self._tokens, self._samples = tokens, samples
        self._buffers.clear()
        self._recording = []
        try:
            build()
        except BaseException:
            self._tokens = self._samples = 0  # no step may run what was recorded before: its buffers are gone
            self._buffers.clear()
            raise
        return (Operator * len(self._recording))(*self._recording)

    def _record_network(self, tokens: int, samples: int) -> None:
        parameters = self._parameters
        assert parameters is not None, "prepare comes first"

        def network() -> None:
            hidden = forward(parameters, None, self)
            self.check(hidden)
            last = self._buffer("last", parameters.norm.shape[0], samples)
            self._network_operators = len(self._recording)
            self._append(TAKE, last, hidden, of_samples=1)
            self._scores = self._buffer("scores", self._config.vocabulary, samples, torch.float32)
            self._append_linear(last, parameters.head, self._scores, of_samples=1)

        self._program = self.record(network, tokens, samples)
        head = self._recording[self._network_operators :]
        self._head = (Operator * len(head))(*head)

    # --- model.kernels.Kernels: record -------------------------------------------------------------------------------

    def prepare(self, parameters: Parameters) -> None:
        """Norms become float32. Every matrix is packed into one run of huge pages and its plain form released."""
        parameters.norm = parameters.norm.float()
        linears = [parameters.head]
        for layer in parameters.layers:
            layer.input_norm, layer.mlp_norm = layer.input_norm.float(), layer.mlp_norm.float()
            if layer.q_norm is not None and layer.k_norm is not None:
                layer.q_norm, layer.k_norm = layer.q_norm.float(), layer.k_norm.float()
            linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
        self._embedding_is_packed = int(parameters.head.weight is parameters.embedding)
        self.pack(linears)
        if self._embedding_is_packed:
            parameters.embedding = parameters.head.weight
        self._library.pagewalk_trim()
        self._parameters = parameters

    def pack(self, linears: list[Linear]) -> None:
        """Replace the weights by packed ones, all in one run of memory."""
        sizes = [self._library.pagewalk_packed_scalars(self._is_bf16, *linear.weight.shape) for linear in linears]
        for linear, place in zip(linears, _huge(sum(sizes), self._dtype).split(sizes), strict=True):
            plain = linear.weight.contiguous()
            self._library.pagewalk_pack(self._is_bf16, plain.data_ptr(), *plain.shape, place.data_ptr())
            self._outputs[place.data_ptr()] = plain.shape[0]
            linear.weight = place

    def embed(self, embedding: Tensor, step: None) -> Tensor:
        out = self._buffer("embedded", self._config.hidden)
        self._append(EMBED, out, weight=embedding, inputs=self._embedding_is_packed)
        return out

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        outputs = self._outputs[linear.weight.data_ptr()]
        out = self._buffer(("product", outputs), outputs)
        self._append_linear(x, linear, out)
        return out

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum is left in `residual`."""
        out = self._buffer("normed", x.shape[1])
        self._append(NORM, out, x, weight=weight, residual=residual)
        return out, x if residual is None else residual

    def append(self, qkv: Tensor, layer: int, q_norm: Tensor | None, k_norm: Tensor | None, step: None) -> Tensor:
        out = self._buffer("queries", self._config.heads * self._config.head_dim)
        self._append(APPEND, out, qkv, layer=layer, weight=q_norm, weight2=k_norm)
        return out

    def attention(self, q: Tensor, layer: int, step: None) -> Tensor:
        out = self._buffer("mixed", self._config.heads * self._config.head_dim)
        self._append(ATTENTION, out, q, layer=layer)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = self._buffer("gated", gate_up.shape[1] // 2)
        self._append(SILU_MUL, out, gate_up)
        return out

    def check(self, hidden: Tensor) -> None:
        """Mark tokens whose row of `hidden` (T, hidden) is not finite."""
        self._append(CHECK, hidden, hidden)

    def _append_linear(self, x: Tensor, linear: Linear, out: Tensor, of_samples: int = 0) -> None:
        wide = int(out.dtype == torch.float32 and self._is_bf16)
        inputs = x.shape[1]
        self._append(
            LINEAR, out, x, weight=linear.weight, weight2=linear.bias, inputs=inputs, wide=wide, of_samples=of_samples
        )

    def _append(self, kind: int, out: Tensor, x: Tensor | None = None, **fields: Any) -> None:
        operator = Operator(kind=kind, width=out.shape[1], output=out.data_ptr())
        if x is not None:
            operator.input = x.data_ptr()
        for name, value in fields.items():
            setattr(operator, name, value.data_ptr() if isinstance(value, Tensor) else value)
        self._recording.append(operator)

    def _buffer(self, name: Any, width: int, rows: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """(rows or tokens, width): the same one for the same name."""
        if name not in self._buffers:
            shape = (self._tokens if rows is None else rows, width)
            self._buffers[name] = torch.empty(shape, dtype=dtype or self._dtype)
        return self._buffers[name]

    def _declare(self) -> None:
        library, number, address = self._library, ctypes.c_int64, ctypes.c_void_p
        library.pagewalk_packed_scalars.restype = number
        library.pagewalk_packed_scalars.argtypes = [ctypes.c_int, number, number]
        library.pagewalk_pack.restype = None
        library.pagewalk_pack.argtypes = [ctypes.c_int, address, number, number, address]
        library.pagewalk_trim.restype = None
        library.pagewalk_open.restype = address
        library.pagewalk_open.argtypes = [ctypes.c_int, address]
        library.pagewalk_run.restype = None
        library.pagewalk_run.argtypes = [ctypes.c_int, address, address, number, address, ctypes.c_int]
        library.pagewalk_close.restype = None
        library.pagewalk_close.argtypes = [ctypes.c_int, address]


def _grown(size: int, wanted: int) -> int:
    return size if wanted <= size else max(wanted, 2 * size)


HUGE_PAGE = 2 << 20


def _huge(count: int, dtype: torch.dtype) -> Tensor:
    """(count,) zeros at a multiple of a huge page; the system is asked for such pages, and may decline."""
    # Private: shared memory, which is Python's default, has huge pages only where an administrator allows them.
    memory = mmap.mmap(-1, count * dtype.itemsize + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % HUGE_PAGE
    return whole[skip : skip + count * dtype.itemsize].view(dtype)
