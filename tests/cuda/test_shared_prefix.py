"""Decode of sequences that begin with the same frames, against float64: read once for the group, or by each alone."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from kernel_devices import Device
from paged_cases import ABSENT_FRAME, JUNK, PAGE, attention, either, marked, worst_error

from cuda.errors import ShapeMismatch
from cuda.frames import FrameLayout, FramePool
from cuda.paged_decode import MANY_NARROW, WIDE, PagedDecode
from cuda.shared_prefix import SharedPrefix
from mm.shared_prefixes import SharedPrefixes

LIMIT = 5e-3  # 2.5e-3 is what rounding probabilities to bf16 gives


@dataclass
class Family:
    """Sequences that share their first `pages` pages; own: tokens of each behind them."""

    pages: int
    own: list[int]


@dataclass
class SharedCase:
    pool: FramePool
    page_tables: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    shared: SharedPrefixes
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def shared_case(
    layout: FrameLayout, families: list[Family], device: str, generator: torch.Generator, *, layer: int
) -> SharedCase:
    """The members of the families in shuffled places of the batch, over shuffled frames.

    Places past a sequence's end hold JUNK and unused entries name frames that do not exist, as in `paged_case`; frames
    of nobody hold NaN: a kernel that fetches one shows it. A family with pages 0 is a single sequence or some of them.
    """
    count = sum(len(family.own) for family in families)
    frames_needed = sum(f.pages + sum(-(-own // PAGE) for own in f.own) for f in families)
    pool = FramePool(layout, frames_needed + 5, device)
    pool.data.fill_(torch.nan)
    order = torch.randperm(pool.frames, generator=generator)
    places = torch.randperm(count, generator=generator).tolist()
    rows = torch.randperm(count + 3, generator=generator)[:count]
    width = max(f.pages + -(-max(f.own) // PAGE) for f in families) + 2
    tables = torch.full((count + 3, width), ABSENT_FRAME)
    lengths = torch.zeros(count, dtype=torch.int32)
    keys: list[torch.Tensor] = [torch.empty(0)] * count
    values = list(keys)
    used = 0

    def write(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random keys and values of some tokens in new frames: (frames, what is stored)."""
        nonlocal used
        pages = -(-tokens // PAGE)
        mine = order[used : used + pages]
        used += pages
        stored = torch.full((2, pages * PAGE, layout.kv_heads, layout.head_dim), JUNK, dtype=layout.dtype)
        stored[:, :tokens] = torch.randn(2, tokens, layout.kv_heads, layout.head_dim, generator=generator).to(
            layout.dtype
        )
        if pages:
            k, v = stored.unflatten(1, (pages, PAGE)).transpose(2, 3).to(device)
            pool.write(mine.to(device), layer, k, v)
        return mine, stored[:, :tokens].double()

    members: list[int] = []
    starts, shared_pages, taken = [0], [], 0
    for family in families:
        common, prefix = write(family.pages * PAGE)
        for own in family.own:
            place = places[taken]
            taken += 1
            mine, suffix = write(own)
            tables[rows[place], : len(common) + len(mine)] = torch.cat((common, mine))
            lengths[place] = family.pages * PAGE + own
            keys[place], values[place] = torch.cat((prefix, suffix), dim=1)
            if family.pages:
                members.append(place)
        if family.pages:
            starts.append(len(members))
            shared_pages.append(family.pages)
    shared = SharedPrefixes(*(np.array(part, np.int32) for part in (members, starts, shared_pages)))
    numbers = (part.to(device, torch.int32) for part in (marked(tables, generator), rows, lengths))
    return SharedCase(pool, *numbers, shared, keys, values)


def run(
    device: Device,
    generator: torch.Generator,
    families: list[Family],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    shape=WIDE,
    multiprocessors: int | None = None,
) -> float:
    """The worst error of a token's head. The pass runs twice, and must agree bit for bit, with poisoned workspace."""
    case = shared_case(FrameLayout(2, kv_heads, head_dim, dtype), families, device.name, generator, layer=1)
    count = len(case.lengths)
    shared_prefix = SharedPrefix(device.loader, case.pool, heads, count + 2, least_pages=1, always=True)
    if multiprocessors:
        shared_prefix._multiprocessors = multiprocessors  # how work is cut must not matter
    words = np.zeros(shared_prefix.words, np.int32)
    used = shared_prefix.pack(case.shared, case.rows.cpu().numpy(), words)
    assert used
    shared_prefix.state[:used].copy_(torch.from_numpy(words[:used]))
    decode = PagedDecode(device.loader, case.pool, heads, shape=shape)
    q = torch.randn(count, heads * head_dim, generator=generator).to(dtype)
    outs = []
    for _ in range(2):
        shared_prefix.parts.fill_(torch.nan)
        out = torch.full_like(q, torch.nan, device=device.name)
        decode.plan(device.stream, case.page_tables, case.rows, case.lengths, prefixes=shared_prefix.prefixes)
        device.synchronize()  # what begins before its predecessor has ended must not follow the plan
        shared_prefix(device.stream, 1, q.to(device.name), case.page_tables)
        decode(device.stream, 1, q.to(device.name), out, case.page_tables, count, prefix_parts=shared_prefix.parts)
        device.synchronize()
        assert decode.is_at_rest()
        outs.append(out.cpu())
    assert torch.equal(*outs)
    queries = q.view(count, 1, heads, head_dim)
    reference = [attention(queries[b], case.keys[b], case.values[b]) for b in range(count)]
    return worst_error(outs[0].view(count, heads, head_dim), torch.cat(reference))


MIXED = [Family(3, [1, 16, 17]), Family(0, [5, 40]), Family(9, [2, 33]), Family(1, [15, 1, 1, 1, 1])]
"""Groups of several sizes and lengths beside sequences of their own; own parts that end at page edges."""

SHAPES = [(2, 2), (9, 3), (8, 2), (7, 1), (24, 2), (11, 1)]  # 1, 3, 4, 7, 12 and 11 query heads a kv head
ON_ALL = [(9, 3, 64), (8, 2, 128), (11, 1, 64), (24, 2, 128)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), either(ON_ALL, [(*s, d) for s in SHAPES for d in (64, 128)])
)
def test_groups_and_single_sequences_together(device, generator, heads, kv_heads, head_dim) -> None:
    """Any mix of them, for whatever number of query heads."""
    assert run(device, generator, MIXED, heads=heads, kv_heads=kv_heads, head_dim=head_dim) < LIMIT


@pytest.mark.parametrize(("head_dim", "dtype"), either([(64, torch.float16)], [(128, torch.float16)]))
def test_float16(device, generator, head_dim, dtype) -> None:
    """The other 16-bit dtype."""
    assert run(device, generator, MIXED, heads=4, kv_heads=1, head_dim=head_dim, dtype=dtype, shape=MANY_NARROW) < LIMIT


@pytest.mark.parametrize("pages", [1, 7, 8, 9, 16, 17])
def test_prefixes_at_the_edges_of_a_tile(device, generator, pages) -> None:
    """A tile is 8 pages: what the last one holds more is not seen."""
    families = [Family(pages, [1, 20])]
    assert run(device, generator, families, heads=2, kv_heads=1, head_dim=64) < LIMIT


@pytest.mark.parametrize(("members", "heads"), [(1, 4), (2, 4), (32, 2), (33, 4), (64, 3)])
def test_groups_of_any_size(device, generator, members, heads) -> None:
    """A block of work is 128 rows: members in one, in several, in a part of one; one member alone is right too."""
    own = torch.randint(1, 40, (members,), generator=generator).tolist()
    assert run(device, generator, [Family(4, own)], heads=heads, kv_heads=1, head_dim=64) < LIMIT


@pytest.mark.parametrize("multiprocessors", [1, 3, 12])
def test_a_long_prefix_in_parts(device, generator, multiprocessors) -> None:
    """However many parts a prefix is cut into, and whether a block takes one item or many."""
    families = [Family(50, [3, 30, 1]), Family(20, [1, 1])]
    error = run(device, generator, families, heads=2, kv_heads=1, head_dim=64, multiprocessors=multiprocessors)
    assert error < LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (16, 8, 128)])
def test_real_sizes(device, generator, heads, kv_heads, head_dim) -> None:
    """A system prompt of many, choices of one prompt, and others."""
    own = torch.randint(1, 600, (40,), generator=generator).tolist()
    families = [
        Family(300, own),
        *[Family(12 + i, torch.randint(1, 200, (6,), generator=generator).tolist()) for i in range(10)],
        Family(0, [1, 500, 2000]),
    ]
    assert run(device, generator, families, heads=heads, kv_heads=kv_heads, head_dim=head_dim, shape=None) < LIMIT


def shared_of(sizes: list[int], pages: list[int]) -> SharedPrefixes:
    starts = np.cumsum([0, *sizes]).astype(np.int32)
    return SharedPrefixes(np.arange(starts[-1], dtype=np.int32), starts, np.array(pages, np.int32))


def packed(
    device: Device, sizes: list[int], pages: list[int], *, model: str = "8b", always: bool = False, least_pages: int = 4
) -> int:
    heads, kv_heads, head_dim = {"8b": (32, 8, 128), "qwen06b": (16, 8, 128), "smol": (9, 3, 64)}[model]
    pool = FramePool(FrameLayout(1, kv_heads, head_dim, torch.bfloat16), 1, device.name)
    shared_prefix = SharedPrefix(device.loader, pool, heads, 1024, always=always, least_pages=least_pages)
    shared_prefix._multiprocessors = 132
    return shared_prefix.pack(
        shared_of(sizes, pages), np.arange(1024, dtype=np.int32), np.zeros(shared_prefix.words, np.int32)
    )


MEASURED = {  # (members, pages that they share) of each group: which of the models gain more than 3 % on an H200
    ((64, 512),): "8b qwen06b smol",
    ((64, 128),): "8b qwen06b smol",
    ((256, 32),): "8b qwen06b",
    ((128, 64),) * 4: "8b qwen06b smol",
    ((16, 64),) * 4: "8b qwen06b",
    ((4, 64),) * 64: "8b qwen06b",
    ((8, 32),) * 32: "8b qwen06b",
    ((4, 128),) * 16: "8b qwen06b",
    ((16, 256),): "8b qwen06b",
    ((6, 9),) * 170: "",
    ((6, 4),) * 170: "",
    ((128, 16),): "",
    ((32, 32),): "",
    ((8, 64),): "",
}


@pytest.mark.parametrize("groups", MEASURED)
@pytest.mark.parametrize("model", ["8b", "qwen06b", "smol"])
def test_the_pass_runs_where_it_pays(device, groups, model) -> None:
    """As measured, with what the members hold of their own there: 88 to 256 tokens."""
    sizes, pages = (list(part) for part in zip(*groups, strict=True))
    assert (packed(device, sizes, pages, model=model) > 0) == (model in MEASURED[groups])
    assert packed(device, sizes, pages, model=model, always=True)


def test_groups_that_share_little_are_left_out(device) -> None:
    """Whatever the others gain."""
    all_, one = (packed(device, [4, 100], [5, 4], always=True, least_pages=n) for n in (4, 5))
    assert all_ > one > 0
    assert not packed(device, [4, 100], [5, 4], always=True, least_pages=6)


@pytest.mark.parametrize(
    ("sizes", "pages"),
    [
        ([1024], [8000]),
        ([2] * 512, [64] * 512),
        ([64], [512]),
        ([16], [2048]),
        ([6] * 170, [9] * 170),
        ([500, 2], [1, 900]),
    ],
)
def test_work_covers_every_group_once(device, generator, sizes, pages) -> None:
    """Whatever the sizes, the items are each block of rows with all pages of the group, and parts do not overlap."""
    device_loader = device.loader
    pool = FramePool(FrameLayout(1, 2, 64, torch.bfloat16), 1, device.name)
    shared_prefix = SharedPrefix(device_loader, pool, 6, 1024, least_pages=1, always=True)
    shared_prefix._multiprocessors = 132
    words = np.zeros(shared_prefix.words, np.int32)
    assert shared_prefix.pack(shared_of(sizes, pages), np.arange(1024, dtype=np.int32), words)
    count = int(words[5 * 1024])
    work = words[5 * 1024 + 4 :][: 8 * count].reshape(count, 8)
    prefixes = words[: 4 * 1024].reshape(1024, 4)
    first = 0
    owned: list[int] = []
    for size, shared in zip(sizes, pages, strict=True):
        mine = work[work[:, 3] == first]
        blocks = -(-size * 3 // 128)
        assert sorted(set(mine[:, 5].tolist())) == list(range(blocks))
        for block in range(blocks):
            ranges = sorted((int(p), int(p + n)) for p, n in mine[mine[:, 5] == block][:, 1:3])
            assert (ranges[0][0], ranges[-1][1]) == (0, shared)
            assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ranges))
        for member in range(first, first + size):
            skipped, part, parts, _ = prefixes[member].tolist()
            assert skipped == shared
            owned += range(part, part + parts)
        first += size
    assert len(owned) == len(set(owned))
    assert max(owned) < len(shared_prefix.parts) // (6 * 72)
    assert not prefixes[first:].any()


def test_too_many_sequences_are_refused(device) -> None:
    """Each needs room for a part."""
    pool = FramePool(FrameLayout(1, 2, 64, torch.bfloat16), 1, device.name)
    with pytest.raises(ShapeMismatch, match="3000"):
        SharedPrefix(device.loader, pool, 6, 3000)


@pytest.mark.gpu
def test_graph_replays_with_other_groups(device, generator) -> None:
    """Captured once, a graph follows groups, lengths and tables that change in place, also to no groups at all."""
    layout, heads, capacity = FrameLayout(1, 2, 128, torch.bfloat16), 8, 12
    cases = [
        shared_case(layout, families, "cuda", generator, layer=0)
        for families in (MIXED, [Family(40, [1] * 6), Family(2, [50, 3])], [Family(0, [100, 3, 16])])
    ]
    stored = [(case, case.pool.data.clone()) for case in cases]
    pool = max((case.pool for case in cases), key=lambda p: p.frames)
    shared_prefix = SharedPrefix(device.loader, pool, heads, capacity, least_pages=1, always=True)
    decode = PagedDecode(device.loader, pool, heads)
    q = torch.randn(capacity, heads * 128, generator=generator).bfloat16().cuda()
    out = torch.empty_like(q)
    rows, lengths = torch.full((2, capacity), -1, dtype=torch.int32, device="cuda")
    tables = torch.zeros(20, 64, dtype=torch.int32, device="cuda")
    lengths.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        decode.plan(stream, tables, rows, lengths, prefixes=shared_prefix.prefixes)
        out.fill_(torch.nan)  # a kernel must stand between the plan and what overlaps with its predecessor
        shared_prefix(stream, 0, q, tables)
        decode(stream, 0, q, out, tables, capacity, prefix_parts=shared_prefix.parts)
    for case, data in [*stored, *stored]:
        count = len(case.lengths)
        pool.data[: len(data)].copy_(data)
        tables[: case.page_tables.shape[0], : case.page_tables.shape[1]].copy_(case.page_tables)
        rows.fill_(-1)
        lengths.zero_()
        rows[:count].copy_(case.rows)
        lengths[:count].copy_(case.lengths)
        words = np.zeros(shared_prefix.words, np.int32)
        if len(case.shared.pages):
            shared_prefix.pack(case.shared, case.rows.cpu().numpy(), words)
        shared_prefix.state.copy_(torch.from_numpy(words))
        graph.replay()
        torch.cuda.synchronize()
        queries = q[:count].cpu().view(count, 1, heads, 128)
        reference = [attention(queries[b], case.keys[b], case.values[b])[0] for b in range(count)]
        assert worst_error(out[:count].cpu().view(count, heads, 128), torch.stack(reference)) < LIMIT
        assert out[count:].isnan().all()
