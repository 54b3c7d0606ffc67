"""Launcher of batch_linear.cu: a network's matrix products for tens of tokens, on Hopper.

The kernel fetches boxes of its matrices by tensor maps, which the driver makes, 128 bytes each. They lie on the device:
`keep` makes those of every matrix before the first launch, so a launch, and a captured graph, names addresses only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cuda.errors import ShapeMismatch
from cuda.launch import TENSOR_MAP_BYTES, Kernel, KernelLoader, KernelSpec
from cuda.paged_prefill import HOPPER
from cuda.tensors import check_tensor, element_of

TILE, STEP = 128, 64  # weight rows and numbers of K that a box has
ROW_BYTES = 2 * STEP
WARPS = 8  # of a block, that compute; one more fetches
SHARED_BYTES = 224 * 1024  # of a block's stages at most
LEAST_STEPS = 4  # of a part of K
MOST_PARTS = 4  # of a matrix whose tiles alone would keep most multiprocessors busy

TOKENS = (16, 32, 48, 64, 80, 96, 128)
"""Sizes of batches that there are kernels for; a batch takes the next larger one. A token gets the same in all."""


def stages_of(tokens: int) -> int:
    """How many stages a block's ring has."""
    return SHARED_BYTES // _stage_bytes(tokens)


def _stage_bytes(tokens: int) -> int:
    return (TILE + tokens) * ROW_BYTES


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix that maps were made of."""

    rows: int
    columns: int
    maps: dict[int, int]  # rows of a box -> address
    is_gate: bool


class BatchLinear:
    """For one dtype (bf16, fp16) and stream. It keeps workspace, and the maps of the matrices that it is told of."""

    def __init__(
        self,
        loader: KernelLoader,
        dtype: torch.dtype,
        device: str | torch.device,
        *,
        weights: int,
        inputs: int,
        outputs: int,
    ) -> None:
        """weights, inputs: how many `keep` and `keep_input` are told of, at most; outputs: the most of a `product`. For
        devices where `is_possible`.
        """
        self._loader, self._dtype, self._multiprocessors = loader, dtype, loader.multiprocessors
        self._kernels: dict[tuple[int, bool], Kernel] = {}
        for tokens in TOKENS:  # a build for each size: they are compiled side by side
            specs = [_spec(dtype, tokens, gate) for gate in (False, True)]
            self._kernels[tokens, False], self._kernels[tokens, True] = loader.load("batch_linear.cu", specs)
        self._matrices: dict[int, _Matrix] = {}  # by address
        self._maps = torch.zeros(weights + inputs * len(TOKENS), TENSOR_MAP_BYTES, dtype=torch.uint8, device=device)
        self._used = 0
        self._handed = torch.empty(self._multiprocessors, TOKENS[-1] * TILE, dtype=torch.float32, device=device)
        self._flags = torch.zeros(self._multiprocessors, WARPS, dtype=torch.int32, device=device)
        self._most_outputs = outputs
        most = max(self._multiprocessors * TILE, MOST_PARTS * outputs)
        self._sums = torch.empty(TOKENS[-1] * most, dtype=torch.float32, device=device)

    @staticmethod
    def is_possible(loader: KernelLoader, dtype: torch.dtype) -> bool:
        """Whether there are kernels for this device and dtype."""
        return loader.capability == HOPPER and dtype.itemsize == 2

    def keep(self, weight: Tensor, *, gate: bool = False) -> None:
        """Make the map of a weight matrix (outputs, inputs), which must stay where it is. Waits for the device.

        gate: of a gate's and an up projection's, for products with `gate`.
        """
        self._keep(weight, (TILE,), gate=gate, is_shared=False)

    def keep_input(self, x: Tensor) -> None:
        """Make the maps of a buffer (T, inputs) that products are computed from: its first rows."""
        self._keep(x, TOKENS, gate=False, is_shared=True)

    def product(self, stream: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (M, K) weight^T + bias (N,), in parts that give it in sum: (P, M, N) float32, until the next product.

        x begins a buffer that `keep_input` was told of, M is 1 to TOKENS[-1]; N and K are multiples of 8. P depends on
        N and K alone.
        """
        self._check(x, weight, bias, gate=False)
        (tokens, inputs), outputs = x.shape, len(weight)
        tiles = -(-outputs // TILE)
        parts = self._parts_of(tiles, -(-inputs // STEP))
        sums = self._sums[: parts * tokens * outputs].view(parts, tokens, outputs)
        self._launch(stream, x, weight, bias, sums, tiles * parts, parts, gate=False)
        return sums

    def gated(self, stream: int, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out (M, N) = silu(gate) * up, of x (M, K) by weight (2 N, K) and bias (2 N,), a gate's before an up
        projection's. float32 sums, rounded once; else as `product`.
        """
        self._check(x, weight, bias, gate=True)
        check_tensor("out", out, (len(x), len(weight) // 2), self._dtype)
        self._launch(stream, x, weight, bias, out, -(-len(weight) // TILE), 1, gate=True)

    def _parts_of(self, tiles: int, steps: int) -> int:
        """How many blocks divide the K of a tile: so many that they keep most multiprocessors busy, all equally."""
        most = max(1, steps // LEAST_STEPS)
        if 2 * tiles <= self._multiprocessors:
            return min(self._multiprocessors // tiles, most)
        turns = {parts: -(-tiles * parts // self._multiprocessors) for parts in range(1, min(MOST_PARTS, most) + 1)}
        return min(turns, key=lambda parts: turns[parts] / parts)

    def _check(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, gate: bool) -> None:
        matrix, buffer = self._matrices.get(weight.data_ptr()), self._matrices.get(x.data_ptr())
        if matrix is None or buffer is None:  # an empty view has no address either
            raise ShapeMismatch("a product of a matrix or a buffer that no map was made of")
        check_tensor("x", x, (None, buffer.columns), self._dtype)
        (tokens, inputs), (rows, columns) = x.shape, (matrix.rows, matrix.columns)
        if (rows, columns, matrix.is_gate) != (*weight.shape, gate) or inputs != columns or tokens > TOKENS[-1]:
            raise ShapeMismatch(f"{tokens} x {inputs} by a matrix of {rows} x {columns}")
        if rows % 8 or (not gate and rows > self._most_outputs):
            raise ShapeMismatch(f"a matrix of {rows} rows, not a multiple of 8, or more than {self._most_outputs}")
        if bias is not None:
            check_tensor("bias", bias, (rows,), self._dtype)

    def _launch(
        self,
        stream: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        pieces: int,
        parts: int,
        *,
        gate: bool,
    ) -> None:
        tokens = len(x)
        weights, rows = self._matrices[weight.data_ptr()].maps, self._matrices[x.data_ptr()].maps
        size = next(size for size in TOKENS if tokens <= size)
        self._kernels[size, gate].launch(
            stream, min(pieces, self._multiprocessors), weights[TILE], rows[size], bias, out, self._handed,
            self._flags, tokens, out.shape[-1], x.shape[1], parts,
        )  # fmt: skip

    def is_at_rest(self) -> bool:
        """Whether nobody has something handed over: so it must be between launches. For tests."""
        return not self._flags.any()

    def _keep(self, matrix: Tensor, boxes: tuple[int, ...], *, gate: bool, is_shared: bool) -> None:
        check_tensor("matrix", matrix, (None, None), self._dtype)
        rows, columns = matrix.shape
        if columns % 8 or matrix.data_ptr() % 16:
            raise ShapeMismatch(f"a matrix of {rows} x {columns}: rows must begin at multiples of 16 bytes")
        if gate and rows % 16:
            raise ShapeMismatch(f"a gate and an up projection, halves of {rows // 2} rows: not multiples of 8")
        maps: dict[int, int] = {}
        for box in boxes:
            place = self._maps[self._used]
            packed = self._loader.tensor_map(matrix, box, STEP, interleaved=gate, is_shared=is_shared)
            place.copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
            maps[box] = place.data_ptr()
            self._used += 1
        self._matrices[matrix.data_ptr()] = _Matrix(rows, columns, maps, gate)


def _spec(dtype: torch.dtype, tokens: int, gate: bool) -> KernelSpec:
    stages = stages_of(tokens)
    instance = f"batch_linear<{element_of(dtype)}, {tokens}, {stages}, {str(gate).lower()}>"
    return KernelSpec(instance, "PPPPPPiiii", 32 * (WARPS + 1), stages * (_stage_bytes(tokens) + 16), overlap=True)
