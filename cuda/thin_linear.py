"""Launchers of thin_linear.cu: matrix products of a few rows, fused with the norm before and the addition after them.

A launcher belongs to one matrix shape. It holds one kernel for each class of row counts (ROW_CLASSES), because the
number of rows decides how much of x a block can keep, and so how K is divided.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuda.errors import ShapeMismatch, UnsupportedDevice
from cuda.frames import FramePool
from cuda.launch import Argument, KernelLoader, KernelSpec
from cuda.tensors import check_tensor, element_of

ROW_CLASSES = (1, 4, 8, 16, 32)
"""One kernel each. Up to 8 rows cost the same products, but the fewer, the less of K must be divided; a block for one
row is small enough to fit beside one of paged_decode."""

WARPS, STEP, TILE, STAGE_BYTES = 8, 64, 16, 2048  # as in the kernel
PIECE_STAGE_BYTES = TILE * (2 * 1024 + 64)  # of a stream
STREAM = 0  # in the place of `share`
OPERANDS = "PPPPPPPPiiiiiif"
SHARED_BYTES: tuple[tuple[Container[int], int], ...] = (
    ((80, 87), 163 << 10),
    ((90, 100, 103), 227 << 10),
    (range(1000), 99 << 10),
)
"""Of a block, by compute capability; CUDA C++ programming guide, "technical specifications"."""

RINGS = (10, 6, 4, 2)
"""Steps of 2 KB that a warp may have under way. The longest that is useful and fits is taken."""

SMALL_BYTES, LARGE_BYTES = 4 << 20, 32 << 20
"""Of matrices. A small one is under way entirely where K is short, one tile a block, and needs so little shared memory
that it can start beside the attention. For a large one it is best that no second block fits (decision 0009)."""

SMALL_BLOCKS = 2
"""Of a small matrix: blocks a multiprocessor, at most."""

STREAM_BYTES, STREAM_INPUTS, STREAM_MULTIPLE = 24 << 20, 2048, 32
"""Matrices of at least so many bytes, and rows of at least so many numbers and a multiple of so many, are streamed by
bulk copies, where the device has them (decision 0014). In smaller ones a block has no third tile, or a row no second
piece."""

STREAM_STAGES = (2, 5)
"""Pieces of a tile, 33 KB each, that a block has under way: at least, at most."""

STATIC_BYTES = 1024
"""Of shared memory, that the system and the kernel's own variables take."""

X_BYTES = 136 << 10
"""Of x in a block, at most. Dividing K costs about 3 us (parts are written and read, blocks wait for each other), and
so does reading 136 KB of x into every block; a few rows leave room for the next kernel's blocks."""


@dataclass(frozen=True, slots=True)
class ThinShape:
    """How the work of one matrix and class of rows is divided: groups * splits blocks."""

    rows: int
    stages: int  # steps that a warp has under way; of a stream: pieces that a block has
    share: int  # warps of a block that share a tile; STREAM: all, and one more that copies
    splits: int  # of K
    groups: int  # blocks that take tiles in turn
    shared_bytes: int


def squares_of(hidden: int) -> int:
    """Sums of squares that a row of the residual stream is accompanied by: one for every 16 columns."""
    return -(-hidden // TILE)


def is_streamed(capability: int, outputs: int, inputs: int) -> bool:
    """Whether a matrix of 16-bit numbers is read by bulk copies (thin_stream.cuh) on such a device."""
    fits = inputs >= STREAM_INPUTS and inputs % STREAM_MULTIPLE == 0
    return capability >= 90 and fits and 2 * outputs * inputs >= STREAM_BYTES


class ThinWorkspace:
    """Parts of divided sums, and the counters that say whose part came last. One serves all launchers of a stream."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = device
        self.parts = torch.empty(0, dtype=torch.float32, device=device)
        self.tickets = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, parts: int, tickets: int) -> None:
        """Before the first launch: grow to so many numbers."""
        if len(self.parts) < parts:
            self.parts = torch.empty(parts, dtype=torch.float32, device=self.device)
        if len(self.tickets) < tickets:
            self.tickets = torch.zeros(tickets, dtype=torch.int32, device=self.device)


class _ThinLinear:
    """What the launchers below share: which kernel runs for how many rows, and the operands of all of them."""

    def __init__(
        self,
        loader: KernelLoader,
        workspace: ThinWorkspace,
        kernel: str,
        signature: str,
        dtype: torch.dtype,
        outputs: int,
        inputs: int,
        *,
        rows: int,
        distance: int = 8,
        epsilon: float = 0.0,
        head_dim: int | None = None,
        share: int = WARPS,
        streams: bool | None = None,
        splits: int | None = None,
    ) -> None:
        """rows: at most so many in a call. distance: between the weight rows of a pair. share: warps to a tile where K
        is not divided and the matrix not streamed. streams, splits: for tests and measurements; None chooses.

        Raises UnsupportedDevice for dtypes and widths that the kernel does not take, and where no division of K leaves
        a block enough shared memory.
        """
        if dtype.itemsize != 2:
            raise UnsupportedDevice(f"no thin products of {dtype}: they are made for 16 bits")
        if inputs % 8:
            raise UnsupportedDevice(f"rows of {inputs} numbers: thin products take multiples of 8")
        if not 1 <= rows <= ROW_CLASSES[-1]:
            raise ShapeMismatch(f"{rows} rows: thin products take 1 to {ROW_CLASSES[-1]}")
        self.dtype, self.outputs, self.inputs = dtype, outputs, inputs
        self._distance, self._epsilon, self._workspace = distance, epsilon, workspace
        self.tiles = -(-distance // 8) * -(-outputs // (2 * distance))
        classes = [size for size, below in zip(ROW_CLASSES, (0, *ROW_CLASSES), strict=False) if below < rows]
        budget = next(size for capabilities, size in SHARED_BYTES if loader.capability in capabilities)
        if streams and (loader.capability < 90 or inputs % STREAM_MULTIPLE):
            raise UnsupportedDevice(f"rows of {inputs} numbers, capability {loader.capability}: not to be streamed")
        self.streams = is_streamed(loader.capability, outputs, inputs) if streams is None else streams
        if self._x_bytes(1, 1) > self._room(1, budget):  # one row is never divided: the next class is, and does
            classes = classes[1:] or [ROW_CLASSES[1]]
        self.shapes = [self._shape(size, budget, loader.multiprocessors, splits, share) for size in classes]
        for shape in self.shapes:
            if shape.shared_bytes > budget - STATIC_BYTES:
                raise UnsupportedDevice(
                    f"{kernel} of {shape.rows} rows of {inputs} numbers, divided by {shape.splits}: "
                    f"a block needs {shape.shared_bytes} bytes of shared memory, there are {budget - STATIC_BYTES}"
                )
        specs = [
            KernelSpec(
                f"{kernel}<{element_of(dtype)}, {shape.rows}, {shape.stages}, {shape.share}"
                + ("" if head_dim is None else f", {head_dim}")
                + ">",
                OPERANDS + signature,
                (WARPS + 1 if shape.share == STREAM else WARPS) * 32,
                shape.shared_bytes,
                overlap=True,
            )
            for shape in self.shapes
        ]
        self._kernels = loader.load("thin_linear.cu", specs)
        for shape in self.shapes:
            if shape.splits > 1:
                workspace.reserve(shape.splits * self.tiles * 128 * -(-shape.rows // 8), shape.groups)

    def _x_bytes(self, rows: int, splits: int) -> int:
        steps = -(-self.inputs // STEP)
        return rows * (-(-steps // splits) * STEP * 2 + 64)

    def _room(self, rows: int, budget: int) -> int:
        """Bytes for x in a block."""
        if self.streams:
            return budget - STATIC_BYTES - STREAM_STAGES[0] * PIECE_STAGE_BYTES - _sum_bytes(rows)
        return min(X_BYTES, budget - STATIC_BYTES - _fixed_bytes(rows, 4 if budget > 128 << 10 else 2))

    def _shape(self, rows: int, budget: int, multiprocessors: int, splits: int | None, share: int) -> ThinShape:
        """As few splits as x allows, and as leave the multiprocessors about evenly loaded."""
        steps = -(-self.inputs // STEP)

        def load(count: int) -> int:
            groups = max(1, multiprocessors // count)
            return -(-self.tiles // groups) * -(-steps // count)

        if rows == 1:
            splits = 1
        elif splits is None:
            room = self._room(rows, budget)
            least = next((count for count in range(1, steps + 1) if self._x_bytes(rows, count) <= room), steps)
            counts = [1] if least == 1 else list(range(least, min(2 * least, steps) + 1))
            best = min(map(load, counts))
            splits = next(count for count in counts if load(count) <= 1.05 * best)
        if splits > 1:
            share = WARPS
        x_bytes = self._x_bytes(rows, splits)
        if self.streams:
            fixed = _sum_bytes(rows) + x_bytes
            least, most = STREAM_STAGES
            stages = max(least, min(most, (budget - STATIC_BYTES - fixed) // PIECE_STAGE_BYTES))
            groups = min(self.tiles, max(1, multiprocessors // splits))
            return ThinShape(rows, stages, STREAM, splits, groups, stages * PIECE_STAGE_BYTES + fixed)
        groups = min(-(-self.tiles * share // WARPS), max(1, multiprocessors // splits))
        size = 2 * self.outputs * self.inputs
        useful = 10 if size > LARGE_BYTES else 6 if rows == 1 and size >= SMALL_BYTES else 4
        is_short = splits == 1 and steps <= 2 * WARPS
        if size < SMALL_BYTES and is_short and share == WARPS and self.tiles <= SMALL_BLOCKS * multiprocessors:
            useful, groups = 2, self.tiles
        fitting = (n for n in RINGS if n <= useful and _fixed_bytes(rows, n) + x_bytes <= budget - STATIC_BYTES)
        stages = next(fitting, RINGS[-1])
        return ThinShape(rows, stages, share, splits, groups, _fixed_bytes(rows, stages) + x_bytes)

    def _launch(
        self,
        stream: int,
        rows: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *results: Argument,
        norm: tuple[Tensor, Tensor] | None = None,
        picks: Tensor | None = None,
    ) -> None:
        """norm: weight (K,) and squares (rows, K / 16) of the normalization of x. picks (rows,) int32: rows of x."""
        check_tensor("x", x, (None, self.inputs), self.dtype)
        check_tensor("weight", weight, (self.outputs, self.inputs), self.dtype)
        if picks is None and len(x) != rows:
            raise ShapeMismatch(f"x has {len(x)} rows, the result {rows}")
        if bias is not None:
            check_tensor("bias", bias, (self.outputs,), self.dtype)
        if norm is not None:
            check_tensor("norm", norm[0], (self.inputs,), self.dtype)
            check_tensor("squares", norm[1], (rows, squares_of(self.inputs)), torch.float32)
        if picks is not None:
            check_tensor("picks", picks, (rows,), torch.int32)
        if rows == 0:
            return
        found = next((i for i, shape in enumerate(self.shapes) if rows <= shape.rows), None)
        if found is None:
            raise ShapeMismatch(f"{rows} rows: this launcher was made for {self.shapes[-1].rows}")
        shape, work = self.shapes[found], self._workspace
        self._kernels[found].launch(
            stream, shape.groups * shape.splits, weight, bias, x, picks, *(norm or (None, None)),
            work.parts, work.tickets, rows, self.outputs, self.inputs, self._distance, shape.splits,
            squares_of(self.inputs), self._epsilon, *results,
        )  # fmt: skip


def _sum_bytes(rows: int) -> int:
    """Two turns of the warps' sums."""
    return 2 * WARPS * 64 * -(-rows // 8) * 8


def _fixed_bytes(rows: int, stages: int) -> int:
    """The rings, and the sums."""
    return WARPS * stages * STAGE_BYTES + _sum_bytes(rows)


class ThinProduct(_ThinLinear):
    """The normalized rows' product, as it is."""

    def __init__(
        self, loader: KernelLoader, workspace: ThinWorkspace, dtype: torch.dtype, outputs: int, inputs: int, **more: Any
    ) -> None:
        super().__init__(loader, workspace, "thin_product", "P", dtype, outputs, inputs, **more)

    def __call__(
        self, stream: int, x: Tensor, norm: tuple[Tensor, Tensor], weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """out (M, N) = RMS norm of x (M, K), times weight, plus bias."""
        check_tensor("out", out, (None, self.outputs), self.dtype)
        self._launch(stream, len(out), x, weight, bias, out, norm=norm)


class ThinLogits(_ThinLinear):
    """The product in float32, for some rows of x."""

    def __init__(
        self,
        loader: KernelLoader,
        workspace: ThinWorkspace,
        dtype: torch.dtype,
        outputs: int,
        inputs: int,
        *,
        share: int | None = None,
        **more: Any,
    ) -> None:
        """share: for tests; None lets every warp have tiles of its own if there are several for each."""
        if share is None:
            share = 1 if outputs >= 2 * TILE * WARPS * loader.multiprocessors else WARPS
        super().__init__(loader, workspace, "thin_logits", "P", dtype, outputs, inputs, share=share, **more)

    def __call__(self, stream: int, x: Tensor, picks: Tensor, weight: Tensor, out: Tensor) -> None:
        """out (M, N) float32 = rows `picks` (M,) int32 of x, times weight."""
        check_tensor("out", out, (None, self.outputs), torch.float32)
        self._launch(stream, len(out), x, weight, None, out, picks=picks)


class ThinAdd(_ThinLinear):
    """The product added to the residual stream."""

    def __init__(
        self, loader: KernelLoader, workspace: ThinWorkspace, dtype: torch.dtype, outputs: int, inputs: int, **more: Any
    ) -> None:
        super().__init__(loader, workspace, "thin_add", "PP", dtype, outputs, inputs, **more)

    def __call__(
        self, stream: int, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, squares: Tensor
    ) -> None:
        """residual (M, N) += x (M, K) times weight, plus bias, rounded once; squares (M, N / 16) float32 of the sum."""
        check_tensor("residual", residual, (None, self.outputs), self.dtype)
        check_tensor("squares", squares, (len(residual), squares_of(self.outputs)), torch.float32)
        self._launch(stream, len(residual), x, weight, bias, residual, squares)


class ThinGate(_ThinLinear):
    """The first half of the feed-forward network."""

    def __init__(
        self, loader: KernelLoader, workspace: ThinWorkspace, dtype: torch.dtype, width: int, inputs: int, **more: Any
    ) -> None:
        """width: of the result; the weight has the gate's rows, then those of the up projection."""
        if width % 8:
            raise UnsupportedDevice(f"rows of {width} numbers: thin products take multiples of 8")
        super().__init__(loader, workspace, "thin_gate", "P", dtype, 2 * width, inputs, distance=width, **more)

    def __call__(
        self, stream: int, x: Tensor, norm: tuple[Tensor, Tensor], weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """out (M, width) = silu(gate) * up, of the RMS norm of x (M, K)."""
        check_tensor("out", out, (None, self.outputs // 2), self.dtype)
        self._launch(stream, len(out), x, weight, bias, out, norm=norm)


class ThinAppend(_ThinLinear):
    """Queries, rotated, and keys and values, written into their frames: kv_append as the end of a product."""

    def __init__(
        self,
        loader: KernelLoader,
        workspace: ThinWorkspace,
        pool: FramePool,
        query_heads: int,
        inputs: int,
        cosines: Tensor,
        sines: Tensor,
        **more: Any,
    ) -> None:
        """cosines, sines (P, D / 2) float32, by position."""
        layout = pool.layout
        self.pool, self.query_heads, self._cosines, self._sines = pool, query_heads, cosines, sines
        for name, table in (("cosines", cosines), ("sines", sines)):
            check_tensor(name, table, (None, layout.head_dim // 2), torch.float32)
        super().__init__(
            loader,
            workspace,
            "thin_append",
            "PPPPPPPPiiiq",
            layout.dtype,
            (query_heads + 2 * layout.kv_heads) * layout.head_dim,
            inputs,
            distance=layout.head_dim // 2,
            head_dim=layout.head_dim,
            **more,
        )

    def __call__(
        self,
        stream: int,
        layer: int,
        x: Tensor,
        norm: tuple[Tensor, Tensor],
        weight: Tensor,
        bias: Tensor | None,
        queries: Tensor,
        rows: Tensor,
        positions: Tensor,
        page_tables: Tensor,
        failed: Tensor,
    ) -> None:
        """queries (M, H D); rows, positions, page_tables, failed: as for KvAppend."""
        layout, tokens = self.pool.layout, len(queries)
        check_tensor("queries", queries, (None, self.query_heads * layout.head_dim), layout.dtype)
        check_tensor("rows", rows, (tokens,), torch.int32)
        check_tensor("positions", positions, (tokens,), torch.int32)
        check_tensor("page_tables", page_tables, (None, None), torch.int32)
        check_tensor("failed", failed, (len(page_tables),), torch.int32)
        self._launch(
            stream, tokens, x, weight, bias, queries, self._cosines, self._sines, rows, positions, page_tables,
            self.pool.layer_address(layer), failed, self.query_heads, layout.kv_heads, page_tables.shape[1],
            layout.frame_bytes, norm=norm,
        )  # fmt: skip


class ThinEmbed:
    """The first residual: rows of the embedding."""

    def __init__(self, loader: KernelLoader, dtype: torch.dtype, hidden: int) -> None:
        self.dtype, self.hidden = dtype, hidden
        spec = KernelSpec(f"thin_embed<{element_of(dtype)}>", "PPPPi", WARPS * 32, overlap=True)
        (self._kernel,) = loader.load("thin_linear.cu", [spec])

    def __call__(self, stream: int, embedding: Tensor, ids: Tensor, residual: Tensor, squares: Tensor) -> None:
        """residual (M, hidden) = rows ids (M,) int32 of embedding (V, hidden); squares (M, hidden / 16) float32."""
        check_tensor("embedding", embedding, (None, self.hidden), self.dtype)
        check_tensor("residual", residual, (len(ids), self.hidden), self.dtype)
        check_tensor("squares", squares, (len(ids), squares_of(self.hidden)), torch.float32)
        check_tensor("ids", ids, (None,), torch.int32)
        self._kernel.launch(stream, len(ids), embedding, ids, residual, squares, self.hidden)
