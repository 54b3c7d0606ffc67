"""Decode attention against float64, per sequence and head."""

import itertools
from pathlib import Path

import pytest
import torch
from emulated_gpu import EmulatedLoader
from kernel_devices import Device, open_device
from paged_cases import attention, either, paged_case, worst_error

from cuda.errors import ShapeMismatch
from cuda.frames import SHARED, FrameLayout
from cuda.paged_decode import BEFORE_HOPPER, FEW_NARROW, MANY_NARROW, UNWRITTEN, WIDE, DecodeShape, PagedDecode

LIMIT = 5e-3  # 1e-3 is what rounding to bf16 gives
EDGES = [1, 16, 17, 0, 15, 33, 300, 31, 32]


@pytest.fixture(scope="module", params=["emulated-80", "emulated-90", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, build_folder: Path) -> Device:
    """As everywhere, and the code path of Ampere too: this kernel has two."""
    if request.param != "gpu" and not EmulatedLoader.is_possible():
        pytest.skip("the emulated GPU needs g++")
    return open_device(request.param, build_folder)


def set_grid(decode: PagedDecode, multiprocessors: int, device: str) -> None:
    """As if the device had so many."""
    decode._multiprocessors = multiprocessors
    blocks = 3 * multiprocessors
    decode._starts = torch.zeros(2 * blocks * 8, 4, dtype=torch.int32, device=device)
    decode._first_parts = torch.zeros(blocks, dtype=torch.int32, device=device)
    decode._parts = torch.full((2 * blocks, *decode._parts.shape[1:]), UNWRITTEN, dtype=torch.int32, device=device)


def run(
    device, generator, lengths, *, heads, kv_heads, head_dim=128, dtype=torch.bfloat16, shape=None, blocks=None
) -> float:
    """Decode once over random pages; the worst error. Runs twice: the second must agree bit for bit, and leave the
    workspace at rest.
    """
    case = paged_case(FrameLayout(2, kv_heads, head_dim, dtype), lengths, device.name, generator, layer=1)
    decode = PagedDecode(device.loader, case.pool, heads, shape=shape)
    if blocks is not None:
        set_grid(decode, blocks, device.name)  # a grid of any size must do
    q = torch.randn(len(lengths), heads * head_dim, generator=generator).to(dtype)
    outs = []
    for _ in range(2):
        out = torch.full_like(q, float("nan"), device=device.name)
        decode.plan(device.stream, case.page_tables, case.rows, case.lengths)
        device.synchronize()  # the attention may begin before its predecessor has ended: that must not be the plan
        decode(device.stream, 1, q.to(device.name), out, case.page_tables, len(lengths))
        device.synchronize()
        assert decode.is_at_rest()
        outs.append(out.cpu())
    present = torch.tensor(lengths) > 0
    assert torch.equal(outs[0][present], outs[1][present])
    assert outs[0][~present].isnan().all()  # padding is not written
    heads_of = outs[0].view(-1, heads, head_dim)
    reference = [
        attention(q[b].view(1, heads, head_dim), case.keys[b], case.values[b])
        for b in range(len(lengths))
        if lengths[b]
    ]
    return worst_error(heads_of[present], torch.cat([torch.empty(0, heads, head_dim), *reference]))


GROUPS = [(2, 2), (9, 3), (8, 2), (7, 1), (16, 2), (24, 2), (11, 1)]  # 1, 3, 4, 7, 8, 12 and 11 query heads a kv head
GROUPS_ON_ALL = [(2, 2, 64), (9, 3, 64), (8, 2, 128), (7, 1, 128), (16, 2, 64), (24, 2, 128), (11, 1, 64)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), either(GROUPS_ON_ALL, [(*g, d) for g in GROUPS for d in (64, 128)])
)
def test_every_group_size(device, generator, heads, kv_heads, head_dim) -> None:
    """Lengths at page edges, absent sequences among them, whatever number of query heads shares a kv head."""
    assert run(device, generator, EDGES, heads=heads, kv_heads=kv_heads, head_dim=head_dim) < LIMIT


SHAPES = {"few": FEW_NARROW, "wide": WIDE, "narrow": MANY_NARROW, "before Hopper": BEFORE_HOPPER}
SHAPES_ON_ALL = [
    ("few", 128, torch.bfloat16),
    ("wide", 64, torch.float16),
    ("narrow", 128, torch.float16),
    ("before Hopper", 64, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("shape", "head_dim", "dtype"),
    either(SHAPES_ON_ALL, itertools.product(SHAPES, (64, 128), (torch.bfloat16, torch.float16))),
)
def test_every_shape_and_dtype(device, generator, shape, head_dim, dtype) -> None:
    """Each way of filling a multiprocessor gives the same answer."""
    if shape == "wide" and device.loader.capability < 90:
        pytest.skip("it takes more shared memory than there is")
    error = run(device, generator, EDGES, heads=9, kv_heads=3, head_dim=head_dim, dtype=dtype, shape=SHAPES[shape])
    assert error < LIMIT


@pytest.mark.parametrize(("head_dim", "shapes"), [(64, (FEW_NARROW, MANY_NARROW)), (128, (WIDE, WIDE))])
def test_the_shape_follows_the_size_of_the_batch(device, generator, head_dim, shapes) -> None:
    """What the constructor leaves open is decided by sequences * kv heads, and by the head size."""
    case = paged_case(FrameLayout(1, 8, head_dim, torch.bfloat16), [1], device.name, generator)
    decode = PagedDecode(device.loader, case.pool, 32)
    few, many = shapes if device.loader.capability >= 90 else (BEFORE_HOPPER, BEFORE_HOPPER)
    assert [decode._shape(n) for n in (1, 16, 17, 1024)] == [few, few, many, many]


@pytest.mark.parametrize("blocks", [1, 2, 5, 132])
def test_every_grid(device, generator, blocks) -> None:
    """However the work is cut among blocks, also with most of them idle, or one item cut into many parts."""
    lengths = [700, 1, 0, 0, 40, 129]
    assert run(device, generator, lengths, heads=4, kv_heads=1, head_dim=64, blocks=blocks, shape=MANY_NARROW) < LIMIT


@pytest.mark.parametrize(("heads", "head_dim"), [(4, 64), (3, 128), (1, 64), (8, 128)])
def test_an_item_of_many_parts_is_merged_by_many_warps(device, generator, heads, head_dim) -> None:
    """More parts than one warp asks for at once, by fewer rows than the block has warps, and by as many."""
    shape = {"heads": heads, "kv_heads": 1, "head_dim": head_dim, "shape": FEW_NARROW}
    assert run(device, generator, [5, 16 * 8 * 25 - 3, 40], blocks=27, **shape) < LIMIT


def test_a_query_that_is_not_finite_stays_in_its_row(device, generator) -> None:
    """Its parts are NaN, and yet are seen to have come: the launch ends, and leaves its workspace at rest."""
    case = paged_case(FrameLayout(1, 1, 64, torch.bfloat16), [700, 40, 129], device.name, generator)
    decode = PagedDecode(device.loader, case.pool, 4, shape=MANY_NARROW)
    set_grid(decode, 5, device.name)
    q = torch.randn(3, 4 * 64, generator=generator).bfloat16()
    q[0] = torch.nan
    out = torch.zeros_like(q, device=device.name)
    decode.plan(device.stream, case.page_tables, case.rows, case.lengths)
    device.synchronize()
    decode(device.stream, 0, q.to(device.name), out, case.page_tables, 3)
    device.synchronize()
    assert decode.is_at_rest()
    assert out[0].isnan().all()
    expected = [attention(q[b].view(1, 4, 64), case.keys[b], case.values[b]) for b in (1, 2)]
    assert worst_error(out[1:].view(-1, 4, 64), torch.cat(expected)) < LIMIT


def blocks_of(decode: PagedDecode, shape: DecodeShape, lengths: list[int]) -> list[dict[int, int]]:
    """By block, the pages that the plan gives it of each sequence. One kv head."""
    blocks = decode._blocks(shape)
    starts = decode._starts[: 2 * blocks * shape.warps].view(blocks, shape.warps, 2, 4)[:, :, 0].cpu()
    found: list[dict[int, int]] = []
    for warps in starts.tolist():
        mine: dict[int, int] = {}
        for sequence, item, page, count in warps:
            assert item == 0
            while count > 0:
                pages = min(count, -(-lengths[sequence] // 16) - page)
                if pages:
                    mine[sequence] = mine.get(sequence, 0) + pages
                sequence, page, count = sequence + 1, 0, count - pages
        found.append(mine)
    return found


@pytest.mark.parametrize(
    ("multiprocessors", "lengths", "parts"),
    [
        (5, [100, 1, 0, 300], [1, 1, 0, 1]),  # a block each
        (5, [100, 1, 0, 6400], [1, 1, 0, 10]),  # one is long: cut among all
        (2, [160] * 3 + [0] + [160] * 3, [1] * 3 + [0] + [1] * 3),  # more than blocks: every cut is near an edge
        (2, [160, 16 * 61, 160], [1, 3, 1]),  # two cuts are far from one
        (5, [16 * 99 - 5, 0, 16 * 198], [3, 0, 6]),  # ranges of 33 pages, where an even one has 30
        (4, [16 * 100, 16 * 99], [4, 4]),  # no block has of both
    ],
)
def test_sequences_are_cut_only_far_from_their_edges(device, generator, multiprocessors, lengths, parts) -> None:
    """What lies in one block is merged with no other; and all pages are in some block."""
    case = paged_case(FrameLayout(1, 1, 128, torch.bfloat16), lengths, device.name, generator)
    shape = DecodeShape(4, 3, 2)
    decode = PagedDecode(device.loader, case.pool, 3, shape=shape)
    set_grid(decode, multiprocessors, device.name)
    decode.plan(device.stream, case.page_tables, case.rows, case.lengths)
    blocks = blocks_of(decode, shape, lengths)
    for sequence, length in enumerate(lengths):
        assert sum(block.get(sequence, 0) for block in blocks) == -(-length // 16)
    found = [sum(sequence in block for block in blocks) for sequence in range(len(lengths))]
    assert found == parts


@pytest.mark.parametrize(("lengths", "least", "most"), [([16 * 99 - 5, 0, 16 * 198], 33, 33), ([1601, 1583], 24, 26)])
def test_items_with_blocks_of_their_own_are_cut_evenly(device, generator, lengths, least, most) -> None:
    """To a page, whatever the items' edges are."""
    case = paged_case(FrameLayout(1, 1, 128, torch.bfloat16), lengths, device.name, generator)
    shape = DecodeShape(4, 3, 2)
    decode = PagedDecode(device.loader, case.pool, 3, shape=shape)
    set_grid(decode, 5 if lengths[1] == 0 else 4, device.name)
    decode.plan(device.stream, case.page_tables, case.rows, case.lengths)
    pages = [sum(block.values()) for block in blocks_of(decode, shape, lengths) if block]
    assert (min(pages), max(pages)) == (least, most)


@pytest.mark.parametrize("lengths", [[16 * 80 - 3, 0, 800], [16 * 80 - 3, 800, 0], [0, 700, 700, 650]])
def test_several_items_a_sequence_have_blocks_of_their_own(device, generator, lengths) -> None:
    """What the plan gives them is merged to the right results."""
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 64, "shape": MANY_NARROW}
    assert run(device, generator, lengths, blocks=5, **shape) < LIMIT


@pytest.mark.parametrize(("heads", "head_dim"), [(8, 128), (9, 64), (32, 64)])
def test_hints_in_the_page_tables_change_nothing(device, generator, heads, head_dim) -> None:
    """Whether a page is said to be shared decides where it is cached alone: the results agree bit for bit. Whole pages
    and last ones, and items that have a page in common (16 query heads a kv head).
    """
    lengths = [300, 1, 17, 0, 64]
    case = paged_case(FrameLayout(1, 2 if heads != 9 else 3, head_dim, torch.bfloat16), lengths, device.name, generator)
    decode = PagedDecode(device.loader, case.pool, heads)
    q = torch.randn(len(lengths), heads * head_dim, generator=generator).bfloat16().to(device.name)
    outs = []
    for tables in (case.page_tables, case.page_tables & ~SHARED, case.page_tables | SHARED):
        out = torch.zeros_like(q)
        decode.plan(device.stream, tables, case.rows, case.lengths)
        device.synchronize()
        decode(device.stream, 0, q, out, tables, len(lengths))
        device.synchronize()
        outs.append(out)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert outs[0][0].any()


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (32, 4, 128)])
def test_large_and_ragged(device, generator, heads, kv_heads, head_dim) -> None:
    """Long sequences beside short ones: an item of many parts, many items a block."""
    lengths = [5000, 1, 2048, 2047, 0, 33, 1000, *torch.randint(1, 600, (93,), generator=generator).tolist()]
    assert run(device, generator, lengths, heads=heads, kv_heads=kv_heads, head_dim=head_dim) < LIMIT


def test_no_sequences(device, generator) -> None:
    """A batch of padding alone does nothing."""
    assert run(device, generator, [0, 0, 0], heads=8, kv_heads=2) == 0.0


def test_too_many_sequences_are_refused(device, generator) -> None:
    """The plan kernel has a thread a sequence; more would be silently left out."""
    case = paged_case(FrameLayout(1, 1, 64, torch.bfloat16), [1], device.name, generator)
    decode = PagedDecode(device.loader, case.pool, 1)
    many = torch.zeros(1025, dtype=torch.int32, device=device.name)
    with pytest.raises(ShapeMismatch, match="1025"):
        decode.plan(device.stream, case.page_tables, many, many)


@pytest.mark.gpu
def test_graph_replays_with_other_lengths(device, generator) -> None:
    """Captured once, a graph follows lengths, tables and rows that change in place."""
    layout, heads, capacity = FrameLayout(1, 2, 128, torch.bfloat16), 8, 7
    first = paged_case(layout, [5, 100, 0, 31, 0, 0, 0], "cuda", generator)
    second = paged_case(layout, [1, 0, 640, 32, 17, 900, 0], "cuda", generator)
    pool = first.pool if first.pool.frames > second.pool.frames else second.pool
    decode = PagedDecode(device.loader, pool, heads)
    q = torch.randn(capacity, heads * 128, generator=generator).bfloat16().cuda()
    out = torch.empty_like(q)
    rows, lengths = torch.full((2, capacity), -1, dtype=torch.int32, device="cuda")
    tables = torch.zeros(10, 64, dtype=torch.int32, device="cuda")

    def load(case) -> None:
        pool.data[: case.pool.frames].copy_(case.pool.data.clone())
        tables[:, : case.page_tables.shape[1]].copy_(case.page_tables)
        rows.copy_(case.rows)
        lengths.copy_(case.lengths)

    stored = [(case, case.pool.data.clone()) for case in (first, second)]
    lengths.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        decode.plan(stream, tables, rows, lengths)
        out.fill_(float("nan"))  # a kernel must stand between the plan and what overlaps with its predecessor
        decode(stream, 0, q, out, tables, capacity)
    for case, data in [*stored, *stored]:
        case.pool.data.copy_(data)
        load(case)
        graph.replay()
        torch.cuda.synchronize()
        present = case.lengths.cpu() > 0
        reference = [
            attention(q[b].cpu().view(1, heads, 128), case.keys[b], case.values[b])[0]
            for b in range(capacity)
            if present[b]
        ]
        assert worst_error(out.cpu().view(capacity, heads, 128)[present], torch.stack(reference)) < LIMIT
        assert out.cpu()[~present].isnan().all()
        assert decode.is_at_rest()
