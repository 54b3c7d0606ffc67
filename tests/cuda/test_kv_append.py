"""RoPE, QK-norm and the write of keys and values, against float64."""

import itertools
import math

import pytest
import torch
from paged_cases import either, marked

from cuda.frames import FrameLayout, FramePool
from cuda.kv_append import KvAppend

EPSILON = 1e-6
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2**-20}


def rope_tables(head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)[None, :]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """(T, heads, D) by (T, D / 2), in the order of GPT-NeoX."""
    first, second = x.chunk(2, dim=-1)
    c, s = cosines[:, None], sines[:, None]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def normalize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()


class Setup:
    """A pool of two layers, one row of the page tables per token, some tokens in one row; the second token is
    padding.
    """

    def __init__(self, device, generator, dtype, heads, kv_heads, head_dim) -> None:
        self.device, self.dtype, self.heads, self.kv_heads, self.head_dim = device, dtype, heads, kv_heads, head_dim
        self.generator = generator
        self.layout = FrameLayout(2, kv_heads, head_dim, dtype)
        self.pool = FramePool(self.layout, 12, device.name)
        self.positions = torch.tensor([0, 7, 15, 16, 47, 33, 34], dtype=torch.int32)
        self.rows = torch.tensor([2, -1, 0, 3, 1, 4, 4], dtype=torch.int32)
        absent = 90  # a frame that does not exist: using such an entry would be seen
        entries = [
            [9, absent, absent],
            [absent, absent, 3],
            [7, absent, absent],
            [absent, 5, absent],
            [absent, absent, 1],
        ]
        self.tables = torch.tensor(entries, dtype=torch.int32)
        self.qkv = torch.randn(7, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
        self.cosines, self.sines = rope_tables(head_dim, 64)
        self.failed = torch.zeros(5, dtype=torch.int32)

    def run(self, norms=None, in_place=False, parts=0) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries (7, H, D), failed (5,)), both on the CPU. parts: qkv comes as so many that give it in sum."""
        name = self.device.name
        append = KvAppend(
            self.device.loader, self.pool, self.heads, self.cosines.to(name), self.sines.to(name), EPSILON
        )
        qkv = self.qkv.to(name, copy=True)
        if parts:
            shares = torch.rand(parts, *qkv.shape, generator=self.generator).softmax(0).to(name)
            qkv = qkv.float() * shares
        width = self.heads * self.head_dim
        q_out = qkv[:, :width] if in_place else torch.full((7, width), float("nan"), dtype=self.dtype, device=name)
        failed = self.failed.to(name, copy=True)
        on_device = None if norms is None else tuple(w.to(name) for w in norms)
        append(
            self.device.stream,
            1,
            qkv,
            q_out,
            on_device,
            self.rows.to(name),
            self.positions.to(name),
            marked(self.tables, self.generator).to(name),
            failed,
        )
        self.device.synchronize()
        return q_out.cpu().reshape(7, self.heads, self.head_dim), failed.cpu()

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = self.qkv.double().view(7, -1, self.head_dim)
        return heads[:, : self.heads], heads[:, self.heads : -self.kv_heads], heads[:, -self.kv_heads :]

    def stored(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) (KH, D) of a token, out of the pool."""
        position = int(self.positions[token])
        frame = self.tables[self.rows[token], position // 16]
        keys, values = self.pool.read(frame[None].to(self.device.name), 1)
        return keys[0, :, position % 16].cpu(), values[0, :, position % 16].cpu()


REAL = [0, 2, 3, 4, 5, 6]  # token 1 is padding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_what_comes_in_parts_is_added_up(device, generator, dtype, parts) -> None:
    """To what it gives as one, but for its last bit."""
    whole, apart = (Setup(device, torch.Generator().manual_seed(1), dtype, 8, 2, 128) for _ in range(2))
    norms = tuple(torch.randn(2, 128, generator=generator).to(dtype))
    (expected, _), (q, failed) = whole.run(norms), apart.run(norms, parts=parts)
    assert not failed.any()
    for got, wanted in (
        (q[REAL], expected[REAL]),
        *((apart.stored(token)[i], whole.stored(token)[i]) for token in REAL for i in (0, 1)),
    ):
        assert (got.double() - wanted.double()).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()
    assert q[1].isnan().all()


SHAPES = [(9, 3, 64), (2, 2, 64), (8, 2, 128), (7, 1, 128)]
ON_ALL = [
    (torch.bfloat16, (9, 3, 64), False, True),
    (torch.bfloat16, (8, 2, 128), True, False),
    (torch.float16, (2, 2, 64), True, True),
    (torch.float32, (9, 3, 64), True, False),
    (torch.float32, (7, 1, 128), False, False),
]


@pytest.mark.parametrize(
    ("dtype", "shape", "with_norm", "in_place"),
    either(ON_ALL, itertools.product(TOLERANCE, SHAPES, (False, True), (False, True))),
)
def test_rotates_and_writes(device, generator, dtype, shape, with_norm, in_place) -> None:
    """Queries, keys and values of every real token are where they belong; nothing else in the pool has changed."""
    heads, kv_heads, head_dim = shape
    setup = Setup(device, generator, dtype, heads, kv_heads, head_dim)
    norms = tuple(torch.randn(2, head_dim, generator=generator).to(dtype)) if with_norm else None
    q, failed = setup.run(norms, in_place)
    queries, keys, values = setup.parts()
    if norms is not None:
        queries, keys = normalize(queries, norms[0].double()), normalize(keys, norms[1].double())
    cosines, sines = setup.cosines[setup.positions].double(), setup.sines[setup.positions].double()
    queries, keys = rotate(queries, cosines, sines), rotate(keys, cosines, sines)
    limit = TOLERANCE[dtype] * max(float(queries.abs().max()), float(keys.abs().max()))
    assert (q[REAL].double() - queries[REAL]).abs().max() <= limit
    if in_place:
        assert torch.equal(q[1].double(), setup.parts()[0][1])
    else:
        assert q[1].isnan().all()
    for token in REAL:
        stored_keys, stored_values = setup.stored(token)
        assert (stored_keys.double() - keys[token]).abs().max() <= limit
        assert torch.equal(stored_values.double(), values[token])
    assert not failed.any()
    written = (setup.pool.data[:, 1].cpu() != 0).sum()
    assert written <= len(REAL) * 2 * kv_heads * head_dim
    assert not setup.pool.data[:, 0].any()  # the other layer


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_what_fp16_cannot_hold_is_flagged_also_in_parts(device, generator, parts) -> None:
    """A sum of 70,000 is infinite as a number of fp16."""
    setup = Setup(device, generator, torch.float16, 2, 1, 64)
    setup.qkv = setup.qkv.float()
    setup.qkv[3, 2 * 64 + 40] = 70000.0
    if not parts:
        setup.qkv = setup.qkv.half()
    _, failed = setup.run(parts=parts)
    assert failed.tolist() == [0, 0, 0, 1, 0]
    assert setup.pool.data.isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("where", "bad"), [("query", math.inf), ("key", math.nan), ("value", -math.inf)])
def test_what_is_not_finite_is_flagged_and_never_stored(device, generator, dtype, where, bad) -> None:
    """The token's row fails, only that one, and the pool stays finite."""
    setup = Setup(device, generator, dtype, 2, 1, 64)
    setup.qkv[3, {"query": 5, "key": 2 * 64 + 40, "value": 3 * 64 + 1}[where]] = bad
    _, failed = setup.run()
    assert failed.tolist() == [0, 0, 0, 1, 0]
    assert setup.pool.data.isfinite().all()
    keys, values = setup.stored(3)
    if where == "key":
        assert keys[0, [40, 8]].tolist() == [0, 0]  # NaN, and what it was rotated with
    if where == "value":
        assert values[0, 1] == torch.finfo(dtype).min


def test_large_numbers_are_clamped_to_the_dtype(device, generator) -> None:
    """A rotation can leave fp16's range: the largest number is stored, not infinity."""
    setup = Setup(device, generator, torch.float16, 2, 1, 64)
    setup.qkv[4] = 60000.0
    _, failed = setup.run()
    assert setup.pool.data.isfinite().all()
    assert setup.stored(4)[0].abs().max() == 65504
    assert not failed.any()


def test_a_page_that_is_not_there_fails_the_row(device, generator) -> None:
    """A table entry of -1 is a mistake of the memory manager: nothing is written through it, and it shows."""
    setup = Setup(device, generator, torch.bfloat16, 2, 1, 64)
    setup.tables[2, 0] = -1
    _, failed = setup.run()
    assert failed.tolist() == [0, 0, 1, 0, 0]
