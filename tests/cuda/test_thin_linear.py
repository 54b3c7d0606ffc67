"""Products of a few rows, with the norms, additions and rotations fused into them, against float64."""

import pytest
import torch
from paged_cases import marked

from cuda import thin_linear
from cuda.errors import ShapeMismatch, UnsupportedDevice
from cuda.frames import FrameLayout, FramePool
from cuda.kv_append import KvAppend
from cuda.launch import KernelSpec
from cuda.rms_norm import RmsNorm
from cuda.silu_mul import SiluMul
from cuda.thin_linear import (
    ROW_CLASSES,
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

EPSILON = 1e-5
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of the result's largest number; x is rounded once before
EXACT_SUMS = 2**-18  # products of 16-bit numbers are exact in float32

CASES = [  # rows, outputs, inputs, splits, streams: all classes of rows; ragged tiles, steps, K; more tiles than blocks
    (1, 40, 96, None, False),
    (2, 33, 72, None, False),
    (5, 130, 584, None, False),
    (8, 16, 64, None, False),
    (3, 96, 200, 2, False),
    (9, 56, 128, 2, False),
    (16, 72, 256, 3, False),
    (17, 24, 136, None, False),
    (32, 40, 320, 3, False),
    (1, 40, 96, None, True),  # a piece is 1024 of K
    (3, 130, 2080, None, True),
    (8, 33, 1056, 2, True),
    (16, 200, 2048, None, True),
    (20, 56, 5152, 3, True),
]


class Case:
    """Random operands on a device, and what float64 makes of them."""

    def __init__(self, device, generator, dtype, rows, outputs, inputs, *, bias=True) -> None:
        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            numbers = torch.randn(*shape, generator=generator, device=generator.device)
            return (numbers * scale).to(dtype).to(device.name)

        self.device, self.dtype, self.rows = device, dtype, rows
        self.x = random(rows, inputs)
        self.norm = random(inputs)
        self.weight = random(outputs, inputs, scale=inputs**-0.5)
        self.bias = random(outputs) if bias else None
        self.residual = random(rows, outputs)
        self.work = ThinWorkspace(device.name)

    def squares(self) -> torch.Tensor:
        """As an addition leaves them: a sum for every 16 columns of x."""
        wide = torch.nn.functional.pad(self.x.double(), (0, -self.x.shape[1] % 16))
        return wide.unflatten(1, (-1, 16)).square().sum(-1).float()

    def normed(self) -> torch.Tensor:
        x = self.x.double()
        return self.norm.double() * x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        out = x.double() @ self.weight.double().t()
        return out if self.bias is None else out + self.bias.double()

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype, device=self.device.name)

    def finish(self) -> None:
        self.device.synchronize()
        assert not self.work.tickets.any()


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest, of the largest number; NaN counts as infinite."""
    return float(((result.double() - expected).abs().max() / expected.abs().max()).nan_to_num(nan=float("inf")))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "outputs", "inputs", "splits", "streams"), CASES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_add(device, generator, dtype, rows, outputs, inputs, splits, streams, bias) -> None:
    """The sum replaces the residual, rounded once; its squares are those of what was stored."""
    case = Case(device, generator, dtype, rows, outputs, inputs, bias=bias)
    expected = case.residual.double() + case.product(case.x)
    more = {"rows": ROW_CLASSES[-1], "splits": splits, "streams": streams}
    add = ThinAdd(device.loader, case.work, dtype, outputs, inputs, **more)
    squares = case.empty(rows, squares_of(outputs), dtype=torch.float32)
    add(device.stream, case.x, case.weight, case.bias, case.residual, squares)
    case.finish()
    assert error(case.residual, expected) <= TOLERANCE[dtype] / 2
    assert error(squares.sum(1), case.residual.double().square().sum(1)) <= EXACT_SUMS


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "outputs", "inputs", "splits", "streams"), CASES)
def test_product_of_normalized_rows(device, generator, dtype, rows, outputs, inputs, splits, streams) -> None:
    """The norm comes out of the squares; x is rounded where rms_norm would round it."""
    case = Case(device, generator, dtype, rows, outputs, inputs)
    product = ThinProduct(
        device.loader,
        case.work,
        dtype,
        outputs,
        inputs,
        rows=ROW_CLASSES[-1],
        splits=splits,
        streams=streams,
        epsilon=EPSILON,
    )
    out = case.empty(rows, outputs)
    product(device.stream, case.x, (case.norm, case.squares()), case.weight, case.bias, out)
    case.finish()
    assert error(out, case.product(case.normed())) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "width", "inputs", "splits", "streams"), [(r, w // 8 * 8, *more) for r, w, *more in CASES]
)
def test_gate(device, generator, dtype, rows, width, inputs, splits, streams) -> None:
    """silu(gate) * up of the same row, in float32 up to the result."""
    case = Case(device, generator, dtype, rows, 2 * width, inputs)
    gate = ThinGate(
        device.loader,
        case.work,
        dtype,
        width,
        inputs,
        rows=ROW_CLASSES[-1],
        splits=splits,
        streams=streams,
        epsilon=EPSILON,
    )
    out = case.empty(rows, width)
    gate(device.stream, case.x, (case.norm, case.squares()), case.weight, case.bias, out)
    case.finish()
    g, up = case.product(case.normed()).chunk(2, dim=-1)
    assert error(out, g * g.sigmoid() * up) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("share", [1, 8])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "splits", "streams"), [*CASES, (20, 777, 72, None, False)])
def test_logits_of_picked_rows(device, generator, dtype, share, rows, outputs, inputs, splits, streams) -> None:
    """float32, of the named rows, in any order and twice; the others are not read. Warps with tiles of their own, or
    with a share in one.
    """
    case = Case(device, generator, dtype, rows, outputs, inputs, bias=False)
    picks = torch.randint(0, rows, (rows,), generator=generator)
    expected = case.product(case.x[picks.to(device.name)])
    unused = [m for m in range(rows) if m not in picks.tolist()]
    case.x[unused] = float("nan")
    logits = ThinLogits(
        device.loader,
        case.work,
        dtype,
        outputs,
        inputs,
        rows=ROW_CLASSES[-1],
        share=share,
        splits=splits,
        streams=streams,
    )
    out = case.empty(rows, outputs, dtype=torch.float32)
    logits(device.stream, case.x, picks.int().to(device.name), case.weight, out)
    case.finish()
    assert error(out, expected) <= EXACT_SUMS


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rows", "splits", "streams"),
    [
        (3, 1, 64, 1, None, False),
        (4, 2, 64, 7, 2, False),
        (2, 1, 128, 5, None, False),
        (1, 1, 128, 16, 2, False),
        (2, 1, 128, 1, None, True),
        (3, 1, 64, 9, 2, True),
    ],
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_append_is_a_product_and_kv_append(
    device, generator, dtype, heads, kv_heads, head_dim, rows, splits, streams, bias
) -> None:
    """The same queries, keys and values at the same places, but for rounding; the same rows fail."""
    inputs = 160 if streams else 136
    case = Case(device, generator, dtype, rows, (heads + 2 * kv_heads) * head_dim, inputs, bias=bias)
    layout = FrameLayout(2, kv_heads, head_dim, dtype)
    name, operands = device.name, (case.norm, case.squares())
    angles = torch.randn(64, head_dim // 2, generator=generator)
    tables = torch.randperm(4 * rows, generator=generator).int().view(rows, 4)
    positions = torch.randint(0, 64, (rows,), generator=generator).int()
    owners = torch.randperm(rows, generator=generator).int()
    if rows > 4:
        owners[1] = -1  # padding
        tables[owners[2], positions[2] // 16] = -1  # a page that is not there
        case.x[3, 5] = float("nan")
    arrays = [tensor.to(name) for tensor in (owners, positions, marked(tables, generator))]
    cosines, sines = angles.cos().to(name), angles.sin().to(name)

    pools = [FramePool(layout, 4 * rows, name) for _ in range(2)]
    queries = [case.empty(rows, heads * head_dim) for _ in range(2)]
    failed = [torch.zeros(rows, dtype=torch.int32, device=name) for _ in range(2)]
    more = {"rows": ROW_CLASSES[-1], "splits": splits, "streams": streams, "epsilon": EPSILON}
    fused = ThinAppend(device.loader, case.work, pools[0], heads, inputs, cosines, sines, **more)
    fused(device.stream, 1, case.x, operands, case.weight, case.bias, queries[0], *arrays, failed[0])
    product = ThinProduct(device.loader, case.work, dtype, case.weight.shape[0], inputs, **more)
    qkv = case.empty(rows, case.weight.shape[0])
    product(device.stream, case.x, operands, case.weight, case.bias, qkv)
    append = KvAppend(device.loader, pools[1], heads, cosines, sines, EPSILON)
    append(device.stream, 1, qkv, queries[1], None, *arrays, failed[1])
    case.finish()

    assert torch.equal(failed[0], failed[1])
    assert failed[0].sum() == (2 if rows > 4 else 0)
    assert torch.equal(queries[0].isnan(), queries[1].isnan())
    assert error(queries[0].nan_to_num(), queries[1].double().nan_to_num()) <= TOLERANCE[dtype]
    for frame_pool in pools:
        assert frame_pool.data.isfinite().all()
        assert not frame_pool.data[:, 0].any()  # the other layer
    assert torch.equal(pools[0].data != 0, pools[1].data != 0)
    assert error(pools[0].data, pools[1].data.double()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 96), (3, 8), (16, 4096 + 8)])
def test_embed(device, generator, dtype, rows, hidden) -> None:
    """Rows of the table, and their squares."""
    table = torch.randn(11, hidden, generator=generator).to(dtype).to(device.name)
    ids = torch.randint(0, 11, (rows,), generator=generator).int().to(device.name)
    out = torch.full((rows, hidden), float("nan"), dtype=dtype, device=device.name)
    squares = torch.full((rows, squares_of(hidden)), float("nan"), device=device.name)
    ThinEmbed(device.loader, dtype, hidden)(device.stream, table, ids, out, squares)
    device.synchronize()
    assert torch.equal(out, table[ids.long()])
    assert error(squares.sum(1), out.double().square().sum(1)) <= EXACT_SUMS


@pytest.mark.parametrize(
    ("rows", "splits", "inputs", "streams"), [(4, None, 584, False), (16, 3, 584, False), (4, 2, 2080, True)]
)
def test_a_row_is_the_same_whoever_else_is_there(device, generator, rows, splits, inputs, streams) -> None:
    """Bit for bit, within a class of rows; and a second launch over the same workspace repeats the first."""
    case = Case(device, generator, torch.bfloat16, rows, 56, inputs)
    product = ThinProduct(
        device.loader,
        case.work,
        case.dtype,
        56,
        inputs,
        rows=ROW_CLASSES[-1],
        splits=splits,
        streams=streams,
        epsilon=EPSILON,
    )

    def run(x: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        out = case.empty(len(x), 56)
        product(device.stream, x, (case.norm, squares), case.weight, case.bias, out)
        case.finish()
        return out

    squares = case.squares()
    together = run(case.x, squares)
    assert torch.equal(run(case.x, squares), together)
    few = rows // 2 + 1  # of the same class
    order = torch.randperm(rows, generator=generator)[:few].to(device.name)
    assert torch.equal(run(case.x[order].contiguous(), squares[order].contiguous()), together[order])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_too_wide_for_a_block_is_divided(device, generator, rows) -> None:
    """136 KB of it fit: here 1 row takes 137, so its class gives way to the next."""
    inputs = 70_008
    case = Case(device, generator, torch.bfloat16, rows, 24, inputs, bias=False)
    expected = case.residual.double() + case.product(case.x)
    add = ThinAdd(device.loader, case.work, case.dtype, 24, inputs, rows=rows)
    assert all(shape.splits > 1 for shape in add.shapes)
    squares = case.empty(rows, squares_of(24), dtype=torch.float32)
    add(device.stream, case.x, case.weight, None, case.residual, squares)
    case.finish()
    assert error(case.residual, expected) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("large", [0, 1 << 30], ids=["large", "between"])
@pytest.mark.parametrize("rows", [1, 5])
def test_longer_rings_change_no_bit(device, generator, monkeypatch, rows, large) -> None:
    """How much of a matrix is under way depends on its size; what is added to what does not."""
    case = Case(device, generator, torch.bfloat16, rows, 90, 584)
    residual, squares = case.residual.clone(), case.empty(rows, squares_of(90), dtype=torch.float32)
    add = ThinAdd(device.loader, case.work, case.dtype, 90, 584, rows=rows)
    add(device.stream, case.x, case.weight, case.bias, residual, squares)
    monkeypatch.setattr(thin_linear, "SMALL_BYTES", 0)
    monkeypatch.setattr(thin_linear, "LARGE_BYTES", large)
    longer = ThinAdd(device.loader, case.work, case.dtype, 90, 584, rows=rows)
    assert longer.shapes[-1].stages > add.shapes[-1].stages
    longer(device.stream, case.x, case.weight, case.bias, case.residual, squares)
    case.finish()
    assert torch.equal(case.residual, residual)


def test_what_is_not_finite_stays_in_its_row(device, generator) -> None:
    """NaN in one row of x reaches none of the others, though they share the tensor cores' products."""
    case = Case(device, generator, torch.bfloat16, 3, 40, 96)
    expected = case.residual.double() + case.product(case.x)
    case.x[1, 7] = float("nan")
    add = ThinAdd(device.loader, case.work, case.dtype, 40, 96, rows=3)
    squares = case.empty(3, squares_of(40), dtype=torch.float32)
    add(device.stream, case.x, case.weight, case.bias, case.residual, squares)
    case.finish()
    assert case.residual[1].isnan().all()
    assert squares[1].isnan().all()
    assert error(case.residual[[0, 2]], expected[[0, 2]]) <= TOLERANCE[case.dtype]


def test_refuses_what_it_is_not_made_for(device) -> None:
    """Said when the launcher is made, or by the first call; never by reading beside a tensor."""
    work = ThinWorkspace(device.name)
    with pytest.raises(UnsupportedDevice, match="float32"):
        ThinAdd(device.loader, work, torch.float32, 16, 64, rows=1)
    with pytest.raises(UnsupportedDevice, match="rows of 60 numbers"):
        ThinAdd(device.loader, work, torch.bfloat16, 16, 60, rows=1)
    with pytest.raises(UnsupportedDevice, match="rows of 12 numbers"):
        ThinGate(device.loader, work, torch.bfloat16, 12, 64, rows=1)
    with pytest.raises(ShapeMismatch, match="33 rows"):
        ThinAdd(device.loader, work, torch.bfloat16, 16, 64, rows=ROW_CLASSES[-1] + 1)
    add = ThinAdd(device.loader, work, torch.bfloat16, 16, 64, rows=1)
    wide = torch.zeros(5, 64, dtype=torch.bfloat16, device=device.name)
    weight, residual = wide[:1].expand(16, 64).contiguous(), torch.zeros_like(wide[:, :16]).contiguous()
    squares = torch.zeros(5, 1, device=device.name)
    with pytest.raises(ShapeMismatch, match="made for 1"):
        add(device.stream, wide, weight, None, residual, squares)
    with pytest.raises(ShapeMismatch, match="x has 5 rows, the result 1"):
        add(device.stream, wide, weight, None, residual[:1], squares[:1])
    with pytest.raises(ShapeMismatch, match="weight"):
        add(device.stream, wide[:1], weight[:8], None, residual[:1], squares[:1])


REAL = {  # hidden, (heads + 2 kv heads) * head_dim, heads * head_dim, intermediate, vocabulary, bias
    "Llama-3.1-8B": (4096, 6144, 4096, 14336, 128256, False),
    "SmolLM2-135M": (576, 960, 576, 1536, 49152, False),
    "Qwen3-0.6B": (1024, 4096, 2048, 3072, 151936, False),
    "Qwen2-0.5B": (896, 1152, 896, 4864, 151936, True),
}


class SpecLoader:
    """Keeps what launchers ask for, on a device that is not there."""

    def __init__(self, capability: int, multiprocessors: int) -> None:
        self.capability, self.multiprocessors = capability, multiprocessors
        self.specs: list[KernelSpec] = []

    def load(self, file: str, specs: list[KernelSpec]) -> list[None]:
        self.specs += specs
        return [None for _ in specs]


@pytest.mark.parametrize(("capability", "multiprocessors", "limit"), [(80, 108, 163), (89, 142, 99), (90, 132, 227)])
@pytest.mark.parametrize("name", REAL)
def test_real_shapes_fit_every_device(name, capability, multiprocessors, limit) -> None:
    """All classes of rows have the shared memory they ask for, one KB of it kept for the system and the kernel."""
    hidden, qkv, mixed, intermediate, vocabulary, _ = REAL[name]
    loader, work, dtype = SpecLoader(capability, multiprocessors), ThinWorkspace("cpu"), torch.bfloat16
    launchers = [
        ThinProduct(loader, work, dtype, qkv, hidden, rows=32),
        ThinAdd(loader, work, dtype, hidden, mixed, rows=32),
        ThinGate(loader, work, dtype, intermediate, hidden, rows=32),
        ThinAdd(loader, work, dtype, hidden, intermediate, rows=32),
        ThinLogits(loader, work, dtype, vocabulary, hidden, rows=32),
    ]
    assert max(spec.shared_bytes for spec in loader.specs) <= (limit - 1) << 10
    for launcher in launchers:
        for shape in launcher.shapes:
            assert shape.groups * shape.splits <= max(multiprocessors, launcher.tiles)
            assert shape.splits * -(-launcher.inputs // 64 // shape.splits) * 64 >= launcher.inputs - 63


def test_a_division_that_leaves_too_little_memory_is_refused() -> None:
    """When the launcher is made, with what is needed and what is there."""
    loader = SpecLoader(89, 142)
    with pytest.raises(UnsupportedDevice, match=r"8 rows of 14336 numbers, divided by 2: .* there are 100352"):
        ThinAdd(loader, ThinWorkspace("cpu"), torch.bfloat16, 4096, 14336, rows=32, splits=2)


def test_large_matrices_are_streamed_where_the_device_can() -> None:
    """Every matrix of 8B; none of a network whose rows are a single piece. To ask for it elsewhere is an error."""
    hidden, qkv, mixed, intermediate, _, _ = REAL["Llama-3.1-8B"]
    large = [(qkv, hidden), (hidden, mixed), (2 * intermediate, hidden), (hidden, intermediate)]
    assert all(is_streamed(90, *size) and not is_streamed(89, *size) for size in large)
    assert not is_streamed(90, 49152, 576)
    assert not is_streamed(90, 16384, 4096 + 8)
    work = ThinWorkspace("cpu")
    launcher = ThinAdd(SpecLoader(90, 132), work, torch.bfloat16, hidden, intermediate, rows=1)
    assert [(shape.share, shape.stages, shape.splits) for shape in launcher.shapes] == [(thin_linear.STREAM, 5, 1)]
    for capability, inputs in ((89, 4096), (90, 4096 + 8)):
        with pytest.raises(UnsupportedDevice, match="not to be streamed"):
            ThinAdd(SpecLoader(capability, 132), work, torch.bfloat16, 16, inputs, rows=1, streams=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "dtype"), [*((rows, torch.bfloat16) for rows in (1, 3, 8, 11, 16, 32)), (11, torch.float16)]
)
@pytest.mark.parametrize("name", REAL)
def test_real_shapes_are_no_worse_than_cublas(device, name, rows, dtype) -> None:
    """The root mean square error of every fused kernel, beside that of the kernels that it stands for."""
    hidden, qkv, mixed, intermediate, vocabulary, bias = REAL[name]
    generator = torch.Generator("cuda").manual_seed(rows)
    stream, work = device.stream, ThinWorkspace("cuda")

    def case_of(outputs: int, inputs: int) -> Case:
        case = Case(device, generator, dtype, rows, outputs, inputs, bias=bias)
        case.work = work
        return case

    def rms(result: torch.Tensor, expected: torch.Tensor) -> float:
        return float((result.double() - expected).square().mean().sqrt())

    def linear(case: Case, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, case.weight, case.bias)

    def normed(case: Case) -> torch.Tensor:
        out = torch.empty_like(case.x)
        RmsNorm(device.loader, dtype, hidden, EPSILON)(stream, case.x, None, case.norm, out)
        return out

    more = {"rows": ROW_CLASSES[-1], "epsilon": EPSILON}
    case = case_of(qkv, hidden)
    out = case.empty(rows, qkv)
    ThinProduct(device.loader, work, dtype, qkv, hidden, **more)(
        stream, case.x, (case.norm, case.squares()), case.weight, case.bias, out
    )
    expected = case.product(case.normed())
    assert rms(out, expected) <= 1.02 * rms(linear(case, normed(case)), expected)

    for inputs in (mixed, intermediate):
        case = case_of(hidden, inputs)
        expected = case.residual.double() + case.product(case.x)
        plain = rms(linear(case, case.x) + case.residual, expected)
        squares = case.empty(rows, squares_of(hidden), dtype=torch.float32)
        ThinAdd(device.loader, work, dtype, hidden, inputs, rows=ROW_CLASSES[-1])(
            stream, case.x, case.weight, case.bias, case.residual, squares
        )
        assert rms(case.residual, expected) <= 1.02 * plain
        assert error(squares.sum(1), case.residual.double().square().sum(1)) <= EXACT_SUMS

    case = case_of(2 * intermediate, hidden)
    out, other = case.empty(rows, intermediate), case.empty(rows, intermediate)
    ThinGate(device.loader, work, dtype, intermediate, hidden, **more)(
        stream, case.x, (case.norm, case.squares()), case.weight, case.bias, out
    )
    SiluMul(device.loader, dtype, intermediate)(stream, linear(case, normed(case)), other)
    gate, up = case.product(case.normed()).chunk(2, dim=-1)
    assert rms(out, gate * gate.sigmoid() * up) <= 1.02 * rms(other, gate * gate.sigmoid() * up)

    case = case_of(vocabulary, hidden)
    case.bias = None
    scores = case.empty(rows, vocabulary, dtype=torch.float32)
    picks = torch.arange(rows, dtype=torch.int32, device="cuda")
    ThinLogits(device.loader, work, dtype, vocabulary, hidden, rows=ROW_CLASSES[-1])(
        stream, case.x, picks, case.weight, scores
    )
    assert error(scores, case.product(case.x)) <= EXACT_SUMS
    case.finish()


@pytest.mark.gpu
def test_a_chain_in_a_graph_repeats_itself(device) -> None:
    """Kernels that start before the one in front has ended read nothing too early: a captured chain of layers gives
    the numbers of launches that wait for each other, replay after replay.
    """
    hidden, width, rows, layers = 4096, 14336, 11, 6
    generator = torch.Generator("cuda").manual_seed(1)
    work, dtype = ThinWorkspace("cuda"), torch.bfloat16
    gate = ThinGate(device.loader, work, dtype, width, hidden, rows=ROW_CLASSES[-1], epsilon=EPSILON)
    down = ThinAdd(device.loader, work, dtype, hidden, width, rows=ROW_CLASSES[-1])
    cases = [
        (
            Case(device, generator, dtype, rows, 2 * width, hidden, bias=False),
            Case(device, generator, dtype, rows, hidden, width, bias=False),
        )
        for _ in range(layers)
    ]
    start, start_squares = cases[0][0].x.clone(), cases[0][0].squares()
    residual, squares = start.clone(), start_squares.clone()
    gated = torch.empty(rows, width, dtype=dtype, device="cuda")

    def run(stream: int, *, wait: bool) -> None:
        for up, out in cases:
            gate(stream, residual, (up.norm, squares), up.weight, None, gated)
            if wait:
                torch.cuda.synchronize()
            down(stream, gated, out.weight, None, residual, squares)
            if wait:
                torch.cuda.synchronize()

    run(device.stream, wait=True)
    expected = residual.clone()
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(torch.cuda.current_stream().cuda_stream, wait=False)
    for _ in range(5):
        residual.copy_(start)
        squares.copy_(start_squares)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(residual, expected)
    assert not work.tickets.any()
