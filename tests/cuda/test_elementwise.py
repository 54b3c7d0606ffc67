"""RMS norm and SiLU against float64."""

import pytest
import torch

from cuda.errors import ShapeMismatch
from cuda.rms_norm import RmsNorm
from cuda.silu_mul import SiluMul

TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2**-20}  # of the result's largest number


def close(result: torch.Tensor, reference: torch.Tensor) -> bool:
    return bool((result.double().cpu() - reference).abs().max() <= TOLERANCE[result.dtype] * reference.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 576), (2, 4096), (1, 4096 + 64), (1, 8192)])
def test_rms_norm_adds_the_residual_then_normalizes(device, generator, dtype, rows, width) -> None:
    """The sum replaces the residual, rounded; the result is normalized from what was stored."""
    x, residual = torch.randn(2, rows, width, generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    norm = RmsNorm(device.loader, dtype, width, 1e-5)
    summed = (x.double() + residual.double()).to(dtype).double()
    reference = weight.double() * summed / (summed.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    x, residual, weight = x.to(device.name), residual.to(device.name), weight.to(device.name)
    out = torch.full_like(x, float("nan"))
    norm(device.stream, x, residual, weight, out)
    device.synchronize()
    assert close(out, reference)
    assert close(residual, summed)
    norm(device.stream, residual, None, weight, residual)  # without a residual, in place
    device.synchronize()
    assert close(residual, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("parts", "rows", "width"), [(1, 3, 64), (2, 1, 576), (4, 2, 4096), (7, 2, 8192 + 64)])
def test_rms_norm_of_what_comes_in_parts(device, generator, dtype, parts, rows, width) -> None:
    """Their sum is added to the residual, unrounded; parts of other rows are not."""
    x = torch.randn(parts, rows, width, generator=generator)
    residual = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    summed = (x.double().sum(0) + residual.double()).to(dtype).double()
    reference = weight.double() * summed / (summed.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    residual, out = residual.to(device.name), torch.full((rows, width), torch.nan, dtype=dtype, device=device.name)
    norm = RmsNorm(device.loader, dtype, width, 1e-5)
    norm(device.stream, x.to(device.name), residual, weight.to(device.name), out)
    device.synchronize()
    assert close(residual, summed)
    assert close(out, reference)
    with pytest.raises(ShapeMismatch, match="x must be"):
        norm(device.stream, x.to(device.name, dtype), residual, weight.to(device.name), out)


def test_rms_norm_refuses_a_view_with_gaps(device) -> None:
    """A row that does not follow the one before would be read from the wrong place."""
    norm = RmsNorm(device.loader, torch.float32, 64, 1e-5)
    wide = torch.zeros(2, 128, device=device.name)
    with pytest.raises(ShapeMismatch, match="contiguous"):
        norm(
            device.stream,
            wide[:, :64],
            None,
            torch.ones(64, device=device.name),
            torch.zeros(2, 64, device=device.name),
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 1536), (5, 136)])
def test_silu_mul(device, generator, dtype, rows, width) -> None:
    """gate * sigmoid(gate) * up; large gates of either sign give numbers, not NaN."""
    x = (torch.randn(rows, 2 * width, generator=generator) * 3).to(dtype)
    x[0, 0], x[0, 1] = 100.0, -100.0
    gate, up = x.double().chunk(2, dim=-1)
    out = torch.full((rows, width), float("nan"), dtype=dtype, device=device.name)
    SiluMul(device.loader, dtype, width)(device.stream, x.to(device.name), out)
    device.synchronize()
    assert close(out, gate * gate.sigmoid() * up)
