"""Products of a batch of tokens against float64.

Where it is emulated the device has 3 multiprocessors, or 8 (`wide`), so that small matrices are cut as large ones are.
"""

from pathlib import Path

import pytest
import torch
from emulated_gpu import EmulatedLoader
from kernel_devices import Device

from cuda.batch_linear import TOKENS, BatchLinear
from cuda.errors import ShapeMismatch
from cuda.paged_prefill import HOPPER
from cuda.rms_norm import RmsNorm

BF16, FP16 = torch.bfloat16, torch.float16
ROUNDED = {BF16: 2**-8, FP16: 2**-11}  # of a number; sums are float32
SUMS = 2**-18  # of the largest


def large(*values: object) -> object:
    """A case of 8B."""
    return pytest.param(*values, marks=pytest.mark.gpu)


CASES = [  # dtype, tokens, outputs, inputs. Tiles have 128 outputs, steps 64 inputs
    (BF16, 1, 8, 8),
    (BF16, 9, 264, 200),
    (BF16, 20, 600, 296),  # 5 tiles for 3 blocks
    (BF16, 20, 248, 768),  # K divided by 3, two pieces a block
    (BF16, 64, 512, 328),
    (BF16, 80, 384, 72),
    (BF16, 79, 520, 136),
    (FP16, 16, 392, 264),
    (BF16, 80, 120, 520),  # one tile of 9 steps, for two blocks
    (BF16, 9, 128, 1024),
    (BF16, 33, 1000, 584),
    (FP16, 9, 136, 72),
    (BF16, 128, 264, 328),
]
LARGE_CASES = [  # tokens, outputs, inputs: K divided by 2, 4 and 16; ragged ones; more tiles than blocks
    (1, 4096, 4096),
    (9, 6144, 4096),
    (17, 1024, 8192),
    (32, 4096, 14336),
    (48, 17000, 264),
    (64, 28672, 4096),
    (80, 4096, 4096),
    (73, 6144, 4096),
    (128, 4096, 14336),
    (100, 6144, 4096),
]
GATES = [  # of which each tile has 64 outputs
    (BF16, 1, 200, 136),  # 4 tiles of 3 steps
    (BF16, 16, 8, 72),
    (BF16, 60, 264, 200),  # 5 tiles of 4 steps: two begin in one block and end in the next
    (BF16, 9, 200, 704),  # ... with rings that go round
    (BF16, 64, 64, 64),
    (BF16, 128, 72, 72),
]
LARGE_GATES = [
    (1, 14336, 4096),
    (16, 8, 4096),
    (40, 200, 136),
    (80, 9000, 584),
    (77, 14336, 4096),
    (128, 14336, 4096),
    (96, 9000, 584),
]
CUT = [(600, 296, False), (120, 520, False), (200, 136, True)]  # outputs, inputs, gate: by 3 multiprocessors
LARGE_CUT = [(4096, 4096, False), (14336, 4096, True)]


@pytest.fixture
def hopper(device: Device) -> Device:
    if not BatchLinear.is_possible(device.loader, BF16):
        pytest.skip("wgmma is Hopper's")
    return device


@pytest.fixture
def wide(hopper: Device, build_folder: Path) -> Device:
    """With multiprocessors enough to divide K by 4."""
    return Device(EmulatedLoader(build_folder, HOPPER, 8), "cpu") if hopper.is_emulated else hopper


class Case:
    """Random operands. Rows behind the batch are NaN, and so is what nobody has written yet."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        tokens: int,
        outputs: int,
        inputs: int,
        *,
        bias: bool,
        gate: bool = False,
    ):
        generator = torch.Generator(device.name).manual_seed(tokens)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator, device=device.name) * scale).to(dtype)

        self.device, self.dtype = device, dtype
        self.buffer = random(512, inputs)
        self.buffer[tokens:] = torch.nan
        self.x = self.buffer[:tokens]
        self.weight = random(outputs, inputs, scale=inputs**-0.5)
        self.bias = random(outputs) if bias else None
        self.linear = BatchLinear(device.loader, dtype, device.name, weights=1, inputs=2, outputs=outputs)
        self.linear.keep(self.weight, gate=gate)
        self.linear.keep_input(self.buffer)

    def run(self, tokens: int, outputs: int, *, gate: bool) -> torch.Tensor:
        """The gate's result, or a product: the sum of its parts, float32."""
        x, weight, bias, stream = self.buffer[:tokens], self.weight, self.bias, self.device.stream
        memory = self.linear._sums
        memory.fill_(7.0)
        self.linear._handed.fill_(torch.nan)
        if gate:
            memory = torch.full(((tokens + 160) * outputs,), 7.0, dtype=self.dtype, device=self.device.name)
            result = memory[: tokens * outputs].view(tokens, outputs)
            self.linear.gated(stream, x, weight, bias, result)
        else:
            result = self.linear.product(stream, x, weight, bias)
        self.device.synchronize()
        assert (memory[result.numel() :] == 7).all()  # what lies behind is left alone
        assert self.linear.is_at_rest()
        return result if gate else result.sum(0)

    def expected(self) -> torch.Tensor:
        product = self.x.double() @ self.weight.double().T
        return product if self.bias is None else product + self.bias.double()


def check_product(device: Device, dtype: torch.dtype, tokens: int, outputs: int, inputs: int, *, bias: bool) -> None:
    case = Case(device, dtype, tokens, outputs, inputs, bias=bias)
    expected = case.expected()
    outs = [case.run(tokens, outputs, gate=False) for _ in range(3)]  # what a launch leaves serves the next
    error = (outs[0].double() - expected).abs()
    assert (error <= ROUNDED[dtype] * expected.abs() + SUMS * expected.abs().max()).all()
    assert (error <= 2 * SUMS * expected.abs().max()).all()  # not rounded
    assert all(torch.equal(out, outs[0]) for out in outs), "sums depend on who comes first"


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("dtype", "tokens", "outputs", "inputs"),
    [*CASES, *[large(dtype, *case) for dtype in (BF16, FP16) for case in LARGE_CASES]],
    ids=str,
)
def test_a_product_is_as_exact_as_float32(hopper, dtype, tokens, outputs, inputs, bias) -> None:
    check_product(hopper, dtype, tokens, outputs, inputs, bias=bias)


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(35, 256, 1032), (48, 200, 1024)])
def test_sums_of_four_blocks(wide, tokens, outputs, inputs) -> None:
    """Two tiles, whose 16 or 17 steps are divided."""
    check_product(wide, BF16, tokens, outputs, inputs, bias=True)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("dtype", "tokens", "outputs", "inputs"),
    [*GATES, *[large(dtype, *case) for dtype in (BF16, FP16) for case in LARGE_GATES]],
    ids=str,
)
def test_a_gate_is_as_exact_as_its_rounding(hopper, dtype, tokens, outputs, inputs, bias) -> None:
    case = Case(hopper, dtype, tokens, 2 * outputs, inputs, bias=bias, gate=True)
    gate, up = case.expected().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    outs = [case.run(tokens, outputs, gate=True) for _ in range(3)]
    error = (outs[0].double() - expected).abs()
    assert (error <= ROUNDED[dtype] * expected.abs() + 8 * SUMS * expected.abs().max()).all()
    assert all(torch.equal(out, outs[0]) for out in outs)


ALL_SIZES = (1, 31, *TOKENS)


@pytest.mark.parametrize(
    ("outputs", "inputs", "gate", "sizes"),
    [
        (600, 296, False, ALL_SIZES),
        (120, 520, False, ALL_SIZES),
        (200, 136, True, (1, 9, 64)),  # of the gate's kernels two are emulated: each takes seconds to compile
        *[large(*case, ALL_SIZES) for case in [*LARGE_CUT, (512, 1024, True)]],
    ],
)
def test_what_a_token_gets_depends_on_no_other(hopper, outputs, inputs, gate, sizes) -> None:
    """Neither on how many there are, and which kernel that takes."""
    case = Case(hopper, BF16, sizes[-1], outputs * (2 if gate else 1), inputs, bias=False, gate=gate)
    everyone = case.run(sizes[-1], outputs, gate=gate)
    for tokens in sizes:
        assert torch.equal(case.run(tokens, outputs, gate=gate), everyone[:tokens])


@pytest.mark.parametrize(("outputs", "inputs", "gate"), [*CUT, *[large(*case) for case in LARGE_CUT]])
def test_numbers_that_are_none_stay_with_their_token(hopper, outputs, inputs, gate) -> None:
    """Also where a block goes on from numbers that another hands over."""
    case = Case(hopper, BF16, 14, outputs * (2 if gate else 1), inputs, bias=False, gate=gate)
    good = case.run(14, outputs, gate=gate)
    case.x[3] = torch.nan
    case.x[7, 100] = torch.inf
    case.x[11].view(torch.int16).fill_(-1)
    out = case.run(14, outputs, gate=gate)
    assert not out[[3, 7, 11]].isfinite().any()
    rest = [token for token in range(14) if token not in (3, 7, 11)]
    assert torch.equal(out[rest], good[rest])


@pytest.mark.gpu
def test_products_in_a_graph_see_what_the_kernel_before_wrote(hopper) -> None:
    """They begin before it has ended. A layer of 8B without attention, over one workspace, for few tokens and many."""
    generator = torch.Generator("cuda").manual_seed(5)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(BF16)

    hidden, width = 4096, 14336
    norm = RmsNorm(hopper.loader, BF16, hidden, 1e-5)
    scale = random(hidden, scale=1)
    x, normed, gated = (random(128, n, scale=1) for n in (hidden, hidden, width))
    output, gate_up, down = (
        random(n, k, scale=k**-0.5) for n, k in ((hidden, hidden), (2 * width, hidden), (hidden, width))
    )
    linear = BatchLinear(hopper.loader, BF16, "cuda", weights=3, inputs=2, outputs=hidden)
    for weight in (output, gate_up, down):
        linear.keep(weight, gate=weight is gate_up)
    for buffer in (normed, gated):
        linear.keep_input(buffer)

    def layers(stream: int, after_each=lambda: None) -> None:
        for tokens in (128, 16, 80, 33):
            rows, other, wide = x[:tokens], normed[:tokens], gated[:tokens]
            norm(stream, rows, None, scale, other)
            after_each()
            parts = linear.product(stream, other, output, None)
            after_each()
            norm(stream, parts, rows, scale, other)
            after_each()
            linear.gated(stream, other, gate_up, None, wide)
            after_each()
            parts = linear.product(stream, wide, down, None)
            after_each()
            norm(stream, parts, rows, scale, other)
            after_each()

    first = x.clone()
    layers(hopper.stream, torch.cuda.synchronize)
    expected = x.clone()
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(torch.cuda.current_stream().cuda_stream)
    for _ in range(20):
        x.copy_(first)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(x, expected)
        assert linear.is_at_rest()


def test_what_it_was_not_told_of_is_refused(hopper) -> None:
    case = Case(hopper, BF16, 8, 128, 64, bias=False)
    product, gated, stream = case.linear.product, case.linear.gated, hopper.stream
    out = torch.empty(8, 64, dtype=BF16, device=hopper.name)
    with pytest.raises(ShapeMismatch, match="no map"):
        product(stream, case.x.clone(), case.weight, None)
    with pytest.raises(ShapeMismatch, match="no map"):
        product(stream, case.x, case.weight.clone(), None)
    with pytest.raises(ShapeMismatch, match="matrix of 128 x 64"):
        product(stream, case.x, case.weight[:64], None)
    with pytest.raises(ShapeMismatch, match="matrix of 128 x 64"):  # that is no gate's
        gated(stream, case.x, case.weight, None, out)
    with pytest.raises(ShapeMismatch, match="x must be"):
        product(stream, case.x[:, :32], case.weight, None)
    gate = Case(hopper, BF16, 8, 128, 64, bias=False, gate=True)
    with pytest.raises(ShapeMismatch, match="out must be"):
        gate.linear.gated(stream, gate.x, gate.weight, None, out[:4])
    with pytest.raises(ShapeMismatch, match="bias must be"):
        product(stream, case.x, case.weight, case.weight[0])
    many = torch.zeros(129, 64, dtype=BF16, device=hopper.name)
    case.linear.keep_input(many)
    with pytest.raises(ShapeMismatch, match="129 x 64"):
        product(stream, many, case.weight, None)
    with pytest.raises(ShapeMismatch, match="halves of 12 rows"):
        case.linear.keep(case.weight[:24], gate=True)
