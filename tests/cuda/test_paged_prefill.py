"""Prefill attention, and the plain float32 attention, against float64, per token and head."""

import itertools

import pytest
import torch
from paged_cases import attention, either, paged_case, worst_error

from cuda.errors import ShapeMismatch
from cuda.frames import FrameLayout
from cuda.paged_attention_f32 import PagedAttentionF32
from cuda.paged_prefill import HOPPER, PagedPrefill

LIMIT = 5e-3  # 2.3e-3 is what probabilities in bf16 give
CHUNKS = [
    (1, 1),
    (0, 40),
    (16, 16),
    (17, 80),
    (130, 130),
    (0, 0),
    (5, 300),
]  # (new tokens, keys after them); new = 0: a decode's row


@pytest.fixture(params=[False, True], ids=["chosen", "portable"])
def portable(request) -> bool:
    """The kernel that is chosen for the device (Hopper's, if it is one), and the one that runs everywhere."""
    return request.param


def run(
    device,
    generator,
    chunks,
    *,
    portable,
    heads,
    kv_heads,
    head_dim=128,
    dtype=torch.bfloat16,
    spare_blocks=2,
    loud=(slice(0), 1.0),
) -> float:
    """Prefill all chunks at once, twice with one list: the same bits, and counters at rest. The worst error."""
    lengths = [length for _, length in chunks]
    counts = torch.tensor([new for new, _ in chunks])
    case = paged_case(FrameLayout(2, kv_heads, head_dim, dtype), lengths, device.name, generator, layer=1, loud=loud)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    q = torch.randn(int(starts[-1]), heads * head_dim, generator=generator).to(dtype)
    out = torch.full_like(q, float("nan"), device=device.name)
    prefill = PagedPrefill(device.loader, case.pool, heads, max_tokens=2048, portable=portable)
    blocks = int((-(-counts * (heads // kv_heads) // 128)).sum()) + spare_blocks
    prefill.plan(device.stream, counts.to(device.name, torch.int32), case.lengths, blocks)
    device.synchronize()  # the list is read before the kernel in front has ended
    query_starts = starts.to(device.name, torch.int32)
    arrays = (case.page_tables, case.rows, case.lengths, query_starts)
    prefill(device.stream, 1, q.to(device.name), out, *arrays, blocks)
    again = torch.full_like(out, float("nan"))
    prefill(device.stream, 1, q.to(device.name), again, *arrays, blocks)
    device.synchronize()
    assert torch.equal(out, again)
    assert not prefill.counters().any()
    queries = q.view(-1, heads, head_dim)
    reference = [torch.empty(0, heads, head_dim, dtype=torch.float64)]
    reference += [
        attention(queries[starts[s] : starts[s + 1]], case.keys[s], case.values[s])
        for s in range(len(chunks))
        if counts[s]
    ]
    return worst_error(out.view(-1, heads, head_dim), torch.cat(reference))


GROUPS = [(2, 2), (9, 3), (8, 2), (7, 1), (16, 2)]
DTYPES = (torch.bfloat16, torch.float16)
ON_ALL = [
    (2, 2, 128, torch.bfloat16),
    (9, 3, 64, torch.bfloat16),
    (8, 2, 128, torch.float16),
    (7, 1, 64, torch.float16),
    (16, 2, 64, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    either(ON_ALL, [(*g, d, t) for g, d, t in itertools.product(GROUPS, (64, 128), DTYPES)]),
)
def test_ragged_chunks_over_cached_prefixes(device, generator, heads, kv_heads, head_dim, dtype, portable) -> None:
    """Chunks of one token and of many, with and without keys before them, beside a sequence that does not prefill."""
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    assert run(device, generator, CHUNKS, portable=portable, **shape) < LIMIT


def test_the_list_of_work_may_be_exact(device, generator, portable) -> None:
    """No spare work items: every listed block is a real one."""
    shape = {"heads": 4, "kv_heads": 1, "head_dim": 64}
    assert run(device, generator, [(33, 33), (128, 200)], portable=portable, **shape, spare_blocks=0) < LIMIT


def test_a_block_walks_over_many_tiles_and_items(device, generator, portable) -> None:
    """Both stages of everything are used several times over, also across the border between two items."""
    chunks = [(3, 700), (70, 130), (1, 257), (40, 40)]
    assert run(device, generator, chunks, portable=portable, heads=6, kv_heads=2, head_dim=64) < LIMIT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [10.0, 40.0, 400.0])
def test_a_tile_may_have_scores_far_above_those_before(device, generator, factor, dtype, portable) -> None:
    """What is taken from the scores rises with them, wherever the loud keys lie: 2^20, past fp16, past float32."""
    chunks = [(40, 700), (40, 170)]
    for tokens in (slice(10, 14), slice(300, 302), slice(0, 600, 97)):
        shape = {"heads": 4, "kv_heads": 1, "head_dim": 64, "dtype": dtype, "loud": (tokens, factor)}
        assert run(device, generator, chunks, portable=portable, **shape) < LIMIT


@pytest.mark.parametrize(
    ("chunks", "kv_heads"),
    [
        ([(20, 3000)], 1),  # one item, by all multiprocessors
        ([(30, 1700), (2, 900)], 1),  # two, cut where it comes: a piece ends one and begins the other
        ([(64, 2200)], 2),  # four items for three multiprocessors (emulated): the last is cut
        ([(1, 2500), (3, 70), (0, 40), (1, 5)], 1),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_long_items_are_cut(device, generator, chunks, kv_heads, head_dim, portable) -> None:
    """Their parts are joined to what one block would have computed."""
    shape = {"heads": 4 * kv_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    assert run(device, generator, chunks, portable=portable, **shape) < LIMIT


def test_pieces_cover_what_the_last_full_round_leaves(device, generator) -> None:
    """Each tile of the items after it once. Who comes last, if all had work before, has less. Items of many rounds, and
    short ones, stay whole.
    """
    if device.loader.capability != HOPPER:
        pytest.skip("items are cut by the kernel for Hopper")
    case = paged_case(FrameLayout(1, 1, 64, torch.bfloat16), [1], device.name, generator)
    blocks = device.loader.multiprocessors
    prefill = PagedPrefill(device.loader, case.pool, 4, max_tokens=32 * 9 * blocks + 64)

    def plan(*chunks: tuple[int, int]) -> tuple[list[int], list[list[int]]]:
        tokens, lengths = torch.tensor(chunks, dtype=torch.int32, device=device.name).T.contiguous()
        prefill.plan(device.stream, tokens, lengths, sum(-(-new // 32) for new, _ in chunks))
        device.synchronize()
        whole, count, slope, total, *starts = prefill.pieces().tolist()
        return [whole, count, slope, total], [starts[2 * i : 2 * i + 2] for i in range(count)]

    assert plan((32, 128 * 20 * blocks)) == ([0, blocks, 0, 20 * blocks], [[0, 20 * i] for i in range(blocks)])
    new, cached = 32 * (blocks + 2), 128 * 600
    (whole, count, slope, total), starts = plan((new, cached + new))
    first, second = sorted((cached + 32 * b + 31) // 128 + 1 for b in range(2))[::-1]  # those that see least come last
    assert (whole, total) == (blocks, first + second)
    size, longest = -(-total // blocks), (cached + new - 1) // 128 + 1
    assert count == -(-total // size)
    assert slope == min(longest // 40, size // 2)
    begins = [i * total // count - slope * i * (count - i) // (count - 1) for i in range(count)]
    assert starts == [[blocks + i // first, i % first] for i in begins]
    assert plan((32 * (9 * blocks + 1), 128 * 9 * blocks + 64_000))[0][:2] == [9 * blocks + 1, 0]
    assert plan((32, 32), (32, 64))[0][:2] == [2, 0]


def test_nothing_to_do_touches_nothing(device, generator, portable) -> None:
    """A list without work, as a graph may launch it."""
    assert run(device, generator, [(0, 5), (0, 0)], portable=portable, heads=2, kv_heads=1, head_dim=64) == 0.0


def test_long_work_comes_first(device, generator) -> None:
    """Every block once, in the order of the tiles of 128 keys that it sees."""
    case = paged_case(FrameLayout(1, 1, 64, torch.bfloat16), [1], device.name, generator)
    heads, chunks = 4, [(70, 70), (0, 900), (3, 400), (33, 33), (1, 400), (300, 300), (2, 200_000), (1, 300_000)]
    tokens, lengths = torch.tensor(chunks, dtype=torch.int32, device=device.name).T.contiguous()
    blocks = [(s, b) for s, (new, _) in enumerate(chunks) for b in range(-(-new * heads // 128))]
    prefill = PagedPrefill(device.loader, case.pool, heads, max_tokens=512)
    prefill.plan(device.stream, tokens, lengths, len(blocks) + 3)
    device.synchronize()
    work = [tuple(item) for item in prefill.work().tolist()]
    assert sorted(work) == blocks
    seen = [chunks[s][1] - chunks[s][0] + min((b * 128 + 127) // heads, chunks[s][0] - 1) for s, b in work]
    tiles = [min(last // 128, 1023) for last in seen]
    assert tiles == sorted(tiles, reverse=True)
    assert len(set(tiles)) > 3


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (28, 4, 128)])
def test_long_chunks(device, generator, heads, kv_heads, head_dim, portable) -> None:
    """A chunk far into a long sequence, beside a whole prompt and short ends of others."""
    assert (
        run(
            device,
            generator,
            [(700, 700), (512, 4096), (1, 3000), (64, 64)],
            portable=portable,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
        )
        < LIMIT
    )


def test_a_step_too_large_for_the_list_is_refused(device, generator) -> None:
    """The list of work has room for what the constructor was told, and says so."""
    case = paged_case(FrameLayout(1, 1, 64, torch.bfloat16), [1], device.name, generator)
    prefill = PagedPrefill(device.loader, case.pool, 1, max_tokens=128)
    with pytest.raises(ShapeMismatch, match="blocks"):
        prefill.plan(device.stream, case.lengths, case.lengths, 2000)
    with pytest.raises(ShapeMismatch, match="at most 128"):
        PagedPrefill(device.loader, case.pool, 129, max_tokens=128)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 128)])
def test_float32_attention_is_exact(device, generator, heads, kv_heads, head_dim) -> None:
    """Decodes, chunks and padding tokens in one launch, to the precision of float32."""
    chunks = [(1, 33), (20, 50), (1, 1), (16, 16)]
    case = paged_case(
        FrameLayout(2, kv_heads, head_dim, torch.float32),
        [length for _, length in chunks],
        device.name,
        generator,
        layer=1,
    )
    rows, positions, reference = [], [], []
    tokens = sum(new for new, _ in chunks)
    q = torch.randn(tokens + 3, heads * head_dim, generator=generator)
    at = 0
    for s, (new, length) in enumerate(chunks):
        rows += [int(case.rows[s])] * new
        positions += range(length - new, length)
        reference.append(attention(q[at : at + new].view(new, heads, head_dim), case.keys[s], case.values[s]))
        at += new
    rows, positions = rows + [-1] * 3, positions + [0] * 3
    out = torch.full_like(q, float("nan"), device=device.name)
    token_rows, token_positions = torch.tensor([rows, positions], dtype=torch.int32, device=device.name)
    PagedAttentionF32(device.loader, case.pool, heads)(
        device.stream, 1, q.to(device.name), out, case.page_tables, token_rows, token_positions
    )
    device.synchronize()
    assert worst_error(out[:tokens].view(-1, heads, head_dim), torch.cat(reference)) < 2e-6
    assert out[tokens:].isnan().all()


@pytest.mark.gpu
def test_graph_replays_with_other_chunks(device, generator, portable) -> None:
    """A captured launch of the largest grid follows counts, lengths and tables that change in place."""
    heads, capacity, max_tokens = 8, 4, 256
    cases = [([(100, 100), (0, 50), (7, 200), (0, 0)], 0), ([(1, 700), (200, 210), (0, 0), (33, 33)], 1)]
    built = [
        (chunks, paged_case(FrameLayout(1, 2, 128, torch.bfloat16), [n for _, n in chunks], "cuda", generator))
        for chunks, _ in cases
    ]
    pool = max((case.pool for _, case in built), key=lambda p: p.frames)
    stored = [case.pool.data.clone() for _, case in built]
    prefill = PagedPrefill(device.loader, pool, heads, max_tokens, portable=portable)
    blocks = prefill.max_blocks(max_tokens, capacity)
    q = torch.randn(max_tokens, heads * 128, generator=generator).bfloat16().cuda()
    out = torch.empty_like(q)
    tables = torch.zeros(10, 64, dtype=torch.int32, device="cuda")
    rows, lengths, counts = torch.zeros(3, capacity, dtype=torch.int32, device="cuda")
    starts = torch.zeros(capacity + 1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        prefill.plan(stream, counts, lengths, blocks)
        out.fill_(float("nan"))  # a kernel between them, as there is in a step
        prefill(stream, 0, q, out, tables, rows, lengths, starts, blocks)
    for (chunks, case), data in zip([*built, *built], [*stored, *stored], strict=True):
        pool.data[: len(data)].copy_(data)
        tables[: case.page_tables.shape[0], : case.page_tables.shape[1]].copy_(case.page_tables)
        rows.copy_(case.rows)
        lengths.copy_(case.lengths)
        new = torch.tensor([n for n, _ in chunks])
        counts.copy_(new)
        starts[1:].copy_(new.cumsum(0))
        graph.replay()
        torch.cuda.synchronize()
        at, reference = 0, []
        for s, (n, _) in enumerate(chunks):
            reference.append(attention(q[at : at + n].cpu().view(n, heads, 128), case.keys[s], case.values[s]))
            at += n
        assert worst_error(out[:at].view(-1, heads, 128), torch.cat(reference)) < LIMIT
        assert out[at:].isnan().all()
        assert not prefill.counters().any()
