"""Launcher of batch_linear.cu: a network's matrix products for tens of tokens, on Hopper.

The kernel fetches boxes of its matrices by tensor maps, which the driver makes, 128 bytes each. They lie on the device:
`keep` makes those of every matrix before the first launch, so a launch, and a captured graph, names addresses only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cuda.errors import ShapeMismatch
from cuda.launch import TENSOR_MAP_BYTES, Kernel, KernelLoader, KernelSpec
from cuda.paged_decode import UNWRITTEN
from cuda.paged_prefill import HOPPER
from cuda.tensors import check_tensor, element_of

TILE, STEP = 128, 64  # weight rows and numbers of K that a box has
ROW_BYTES = 2 * STEP
SHARED_BYTES = 225 * 1024  # of a block at most, beside its barriers
LEAST_STEPS = 4  # of a part of K

TOKENS = (16, 32, 48, 64, 80, 96, 128)
"""Sizes of batches that there are kernels for; a batch takes the next larger one. A token gets the same in all."""


def stages_of(tokens: int) -> int:
    """How many stages a block's ring has."""
    return (SHARED_BYTES - 1024) // _stage_bytes(tokens)


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
        self, loader: KernelLoader, dtype: torch.dtype, device: str | torch.device, *, weights: int, inputs: int
    ) -> None:
        """weights, inputs: how many `keep` and `keep_input` are told of, at most. For devices where `is_possible`."""
        self._loader, self._dtype, self._multiprocessors = loader, dtype, loader.multiprocessors
        self._kernels: dict[tuple[int, bool], Kernel] = {}
        for tokens in TOKENS:  # a build for each size: they are compiled side by side
            specs = [_spec(dtype, tokens, gate) for gate in (False, True)]
            self._kernels[tokens, False], self._kernels[tokens, True] = loader.load("batch_linear.cu", specs)
        self._matrices: dict[int, _Matrix] = {}  # by address
        self._maps = torch.zeros(weights + inputs * len(TOKENS), TENSOR_MAP_BYTES, dtype=torch.uint8, device=device)
        self._used = 0
        self._parts = torch.full(
            (self._multiprocessors, TOKENS[-1] * TILE), UNWRITTEN, dtype=torch.int32, device=device
        )

    @staticmethod
    def is_possible(loader: KernelLoader, dtype: torch.dtype) -> bool:
        """Whether there are kernels for this device and dtype."""
        return loader.capability == HOPPER and dtype.itemsize == 2

    def keep(self, weight: Tensor, *, gate: bool = False) -> None:
        """Make the map of a weight matrix (outputs, inputs), which must stay where it is. Waits for the device.

        gate: of a gate's and an up projection's, for products with `gate`.
        """
        self._keep(weight, (TILE,), gate=gate)

    def keep_input(self, x: Tensor) -> None:
        """Make the maps of a buffer (T, inputs) that products are computed from: its first rows."""
        self._keep(x, TOKENS)

    def __call__(
        self, stream: int, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, gate: bool = False
    ) -> None:
        """out (M, N) = x (M, K) weight^T + bias; gate: weight (2 N, K) and bias (2 N,) are a gate's and an up
        projection's, and out = silu(gate) * up.

        x begins a buffer that `keep_input` was told of, M is at most TOKENS[-1]; N and K are multiples of 8. float32
        sums, rounded once.
        """
        tokens, inputs, outputs = len(x), x.shape[1], out.shape[1]
        if not tokens:
            return
        matrix, buffer = self._matrices.get(weight.data_ptr()), self._matrices.get(x.data_ptr())
        if matrix is None or buffer is None:
            raise ShapeMismatch("a product of a matrix or a buffer that no map was made of")
        check_tensor("x", x, (None, buffer.columns), self._dtype)
        check_tensor("out", out, (tokens, outputs), self._dtype)
        rows = 2 * outputs if gate else outputs
        if (matrix.rows, matrix.columns, matrix.is_gate) != (rows, inputs, gate) or tokens > TOKENS[-1] or outputs % 8:
            raise ShapeMismatch(
                f"{tokens} x {inputs} by a matrix of {matrix.rows} x {matrix.columns} into {outputs} outputs"
            )
        if bias is not None:
            check_tensor("bias", bias, (rows,), self._dtype)
        size = next(size for size in TOKENS if tokens <= size)
        tiles, steps = -(-rows // TILE), -(-inputs // STEP)
        splits = 1 if gate else max(1, min(self._multiprocessors // tiles, steps // LEAST_STEPS))
        blocks = min(tiles * splits, self._multiprocessors)
        self._kernels[size, gate].launch(
            stream, blocks, matrix.maps[TILE], buffer.maps[size], bias, out, self._parts,
            tokens, outputs, inputs, splits,
        )  # fmt: skip

    def is_at_rest(self) -> bool:
        """Whether nothing lies in the workspace: so it must be between launches. For tests."""
        return bool((self._parts == UNWRITTEN).all())

    def _keep(self, matrix: Tensor, boxes: tuple[int, ...], *, gate: bool = False) -> None:
        check_tensor("matrix", matrix, (None, None), self._dtype)
        rows, columns = matrix.shape
        if columns % 8 or matrix.data_ptr() % 16:
            raise ShapeMismatch(f"a matrix of {rows} x {columns}: rows must begin at multiples of 16 bytes")
        if gate and rows % 16:
            raise ShapeMismatch(f"a gate and an up projection, halves of {rows // 2} rows: not multiples of 8")
        maps: dict[int, int] = {}
        for box in boxes:
            place = self._maps[self._used]
            packed = self._loader.tensor_map(matrix, box, STEP, interleaved=gate)
            place.copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
            maps[box] = place.data_ptr()
            self._used += 1
        self._matrices[matrix.data_ptr()] = _Matrix(rows, columns, maps, gate)


def _spec(dtype: torch.dtype, tokens: int, gate: bool) -> KernelSpec:
    stages = stages_of(tokens)
    instance = f"batch_linear<{element_of(dtype)}, {tokens}, {stages}, {str(gate).lower()}>"
    return KernelSpec(instance, "PPPPPiiii", 288, stages * _stage_bytes(tokens) + 1024, overlap=True)
