"""The kernels alone, timed inside CUDA graphs over more data than the L2 holds; attention is checked against float64.

    python -m bench.kernels [--quick] [--only cascade,short] [--plot FILE.svg]    prints tables, last a line of JSON
    python -m bench.kernels --drawn FILE.json --plot FILE.svg                     a picture of earlier results

Times are medians of a graph's replays, divided by its launches. A decode launch reads each key and value once, so its
time is judged by bytes / what the card streams (the floor); a prefill launch by its arithmetic. "Share" is that of the
floor in the time. Needs a GPU.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bench.graph_timing import graph_us
from bench.kernel_peers import plot
from bench.sampling_kernels import measure_sampling
from cuda.frames import SHARED, FrameLayout, FramePool
from cuda.kv_append import KvAppend
from cuda.launch import DeviceLoader
from cuda.paged_decode import FEW_NARROW, MANY_NARROW, WIDE, DecodeShape, PagedDecode
from cuda.paged_prefill import PagedPrefill
from cuda.rms_norm import RmsNorm
from cuda.shared_prefix import SharedPrefix
from cuda.silu_mul import SiluMul
from mm.shared_prefixes import SharedPrefixes

STREAM_BYTES_PER_S = 4.53e12  # read-only, measured on an H200
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
L2_BYTES = 60e6
SHAPES = {"wide": WIDE, "few": FEW_NARROW, "narrow": MANY_NARROW}


def ragged(count: int, low: int, high: int) -> list[int]:
    """Seeded lengths, uniform in [low, high]."""
    return torch.randint(low, high + 1, (count,), generator=torch.Generator().manual_seed(5)).tolist()


DECODES: dict[str, list[int]] = {
    "1 x 1,024": [1024],
    "1 x 32,768": [32768],
    "8 x 8,192": [8192] * 8,
    "32 x 512": [512] * 32,
    "64 x 2,048": [2048] * 64,
    "256 x 128": [128] * 256,
    "256 x 1,024": [1024] * 256,
    "256 x 4,096": [4096] * 256,
    "1,024 x 512": [512] * 1024,
    "64 ragged, 1..8,192": ragged(64, 1, 8192),
    "1 x 30,000 + 63 x 500": [30000] + [500] * 63,
}
SHAPE_HEADS = {"8b": (32, 8, 128), "qwen06b": (16, 8, 128), "smol": (9, 3, 64)}  # query heads, kv heads, head size
SHORTS: dict[str, list[int]] = {  # what chat workloads decode
    "1 x 300": [300],
    "64 x 300": [300] * 64,
    "256 x 300": [300] * 256,
    "1,024 x 300": [300] * 1024,
    "256 ragged, 100..1,000": ragged(256, 100, 1000),
    "1,000 x 179": [179] * 1000,
    "640 x 341": [341] * 640,
    "1,000 ragged, 30..330": ragged(1000, 30, 330),
}
CASCADES: dict[str, list[tuple[int, int, int]]] = {  # groups: members, tokens they share, tokens of each behind those
    "64 x (8,192 + 256)": [(64, 8192, 256)],
    "64 x (2,048 + 256)": [(64, 2048, 256)],
    "256 x (512 + 88)": [(256, 512, 88)],
    "4 groups of 128 x (1,024 + 120)": [(128, 1024, 120)] * 4,
    "170 groups of 6 x (144 + 100)": [(6, 144, 100)] * 170,
    "170 groups of 6 x (64 + 100)": [(6, 64, 100)] * 170,
    "4 groups of 16 x (1,024 + 120)": [(16, 1024, 120)] * 4,
    "64 groups of 4 x (1,024 + 200)": [(4, 1024, 200)] * 64,
    "128 x (256 + 256)": [(128, 256, 256)],
    "8 x (1,024 + 120)": [(8, 1024, 120)],
}
PREFILLS: dict[str, tuple[int, int, int]] = {  # sequences, new tokens each, tokens after them
    "1 x 8,192": (1, 8192, 8192),
    "8 x 2,048": (8, 2048, 2048),
    "32 x 512": (32, 512, 512),
    "2,048 new over 30,000": (1, 2048, 32048),
    "512 new over 4,096": (1, 512, 4608),
    "128 new over 30,000": (1, 128, 30128),
}


@dataclass
class Measurement:
    """One row of the table."""

    name: str
    microseconds: float
    rate: float  # TB/s or TFLOP/s
    floor_us: float
    error: float
    others: dict[str, float] = field(default_factory=dict)  # microseconds of the other ways of filling the card

    @property
    def share(self) -> float:
        """Of the floor in the time."""
        return self.floor_us / self.microseconds

    def numbers(self) -> dict[str, float]:
        """For the line of JSON."""
        return {"us": round(self.microseconds, 1), "floor_us": round(self.floor_us, 1), "error": self.error}


@dataclass
class Batch:
    """Sequences over random pages."""

    lengths: torch.Tensor
    rows: torch.Tensor
    tables: torch.Tensor


def random_pool(frames: int, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM) -> FramePool:
    """Finite random keys and values; a random permutation of chunks is as random as a plain page."""
    pool = FramePool(FrameLayout(1, kv_heads, head_dim, torch.bfloat16), frames, "cuda")
    flat = pool.data.flatten()
    for start in range(0, flat.numel(), 1 << 30):
        flat[start : start + (1 << 30)].normal_()
    return pool


def batch_of(lengths: list[int], frames: torch.Tensor) -> Batch:
    """Pages in the given frames, in turn."""
    pages = [-(-length // PAGE) for length in lengths]
    tables = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    used = 0
    for row, count in enumerate(pages):
        tables[row, :count] = frames[used : used + count]
        used += count
    counts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Batch(counts, torch.arange(len(lengths), dtype=torch.int32, device="cuda"), tables.cuda())


def batches_of(lengths: list[int], pool: FramePool) -> list[Batch]:
    """Batches over different frames, together several times what the L2 holds."""
    pages = sum(-(-length // PAGE) for length in lengths)
    order = torch.randperm(pool.frames, generator=torch.Generator().manual_seed(1)).int()
    wanted = max(1, round(4 * L2_BYTES / (pages * pool.layout.layer_bytes)))
    count = max(1, min(wanted, pool.frames // pages))
    return [batch_of(lengths, order[i * pages : (i + 1) * pages]) for i in range(count)]


def reference(pool: FramePool, batch: Batch, sequence: int, q: torch.Tensor) -> torch.Tensor:
    """Attention of the last len(q) tokens of one sequence in float64: q (n, H, D)."""
    length, n, heads, head_dim = int(batch.lengths[sequence]), *q.shape
    frames = batch.tables[int(batch.rows[sequence]), : -(-length // PAGE)] & ~SHARED
    keys, values = (
        part.transpose(1, 2).flatten(0, 1)[:length].double().repeat_interleave(heads // pool.layout.kv_heads, 1)
        for part in pool.read(frames, 0)
    )
    out = torch.empty(n, heads, head_dim, dtype=torch.float64, device="cuda")
    places = torch.arange(length, device="cuda")
    for head in range(heads):
        scores = q[:, head].double() @ keys[:, head].T * head_dim**-0.5
        scores.masked_fill_(places[None, :] > (length - n + torch.arange(n, device="cuda"))[:, None], -torch.inf)
        out[:, head] = scores.softmax(-1) @ values[:, head]
    return out


def error_of(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative error of a token's head."""
    return float(((result.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def measure_decode(
    name: str, lengths: list[int], pool: FramePool, loader: DeviceLoader, *, all_shapes: bool, heads: int = HEADS
) -> Measurement:
    """Time one step's attention of one layer; the plan is made before, as one step makes it once for all layers."""
    batches = batches_of(lengths, pool)
    B, head_dim = len(lengths), pool.layout.head_dim
    q = torch.randn(B, heads * head_dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    times, error = {}, 0.0
    shapes: dict[str, DecodeShape | None] = {"chosen": None, **(SHAPES if all_shapes else {})}
    for label, shape in shapes.items():
        decode = PagedDecode(loader, pool, heads, shape=shape)
        first = batches[0]
        decode.plan(torch.cuda.current_stream().cuda_stream, first.tables, first.rows, first.lengths)
        torch.cuda.synchronize()

        def launch(stream: int, i: int, decode: PagedDecode = decode) -> None:
            batch = batches[i % len(batches)]
            decode(stream, 0, q, out, batch.tables, B)

        launches = max(8, len(batches))
        times[label] = graph_us(launch, launches)
        last = batches[(launches - 1) % len(batches)]
        for sequence in {0, B // 2, B - 1}:
            expected = reference(pool, last, sequence, q[sequence].view(1, heads, head_dim))
            error = max(error, error_of(out[sequence].view(1, heads, head_dim), expected))
    size = sum(lengths) * pool.layout.layer_bytes / PAGE
    chosen = times.pop("chosen")
    return Measurement(name, chosen, size / chosen / 1e6, size / STREAM_BYTES_PER_S * 1e6, error, times)


def shared_batches(groups: list[tuple[int, int, int]], pool: FramePool) -> tuple[list[Batch], SharedPrefixes, int]:
    """Batches over different frames, their groups, and the pages of one batch: together several times the L2."""
    shares = [shared // PAGE for _, shared, _ in groups]
    pages = sum(share + members * -(-own // PAGE) for share, (members, _, own) in zip(shares, groups, strict=True))
    order = torch.randperm(pool.frames, generator=torch.Generator().manual_seed(1)).int()
    wanted = max(2, round(4 * L2_BYTES / (pages * pool.layout.layer_bytes)))
    lengths = [shared + own for members, shared, own in groups for _ in range(members)]
    counts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    rows = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
    batches = []
    for i in range(min(wanted, pool.frames // pages)):
        frames, used, row = order[i * pages : (i + 1) * pages], 0, 0
        tables = torch.zeros(len(lengths), -(-max(lengths) // PAGE), dtype=torch.int32)
        for share, (members, _, own) in zip(shares, groups, strict=True):
            common, used = frames[used : used + share], used + share
            for _ in range(members):
                mine = frames[used : used + -(-own // PAGE)]
                used += len(mine)
                tables[row, : share + len(mine)] = torch.cat((common | SHARED, mine))
                row += 1
        batches.append(Batch(counts, rows, tables.cuda()))
    sizes = [members for members, _, _ in groups]
    starts = np.cumsum([0, *sizes]).astype(np.int32)
    return batches, SharedPrefixes(np.arange(len(lengths), dtype=np.int32), starts, np.array(shares, np.int32)), pages


def measure_cascade(
    name: str, groups: list[tuple[int, int, int]], pool: FramePool, loader: DeviceLoader, heads: int
) -> tuple[Measurement, bool]:
    """Time one layer's attention of decodes that share their beginnings; "plain": each reads all of its own; "prefix":
    the pass over what is shared alone. The floor is that of the bytes that differ. Also, whether the thresholds of
    cuda/shared_prefix.py would have it so.
    """
    batches, shared, pages = shared_batches(groups, pool)
    B, head_dim = len(batches[0].lengths), pool.layout.head_dim
    q = torch.randn(B, heads * head_dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    cascade = SharedPrefix(loader, pool, heads, B, least_pages=1, always=True)
    words, rows = np.zeros(cascade.words, np.int32), batches[0].rows.cpu().numpy()
    cascade.pack(shared, rows, words)
    cascade.state.copy_(torch.from_numpy(words))
    pays = SharedPrefix(loader, pool, heads, B).pack(shared, rows, words) > 0
    decodes = {label: PagedDecode(loader, pool, heads) for label in ("plain", "cascade")}
    stream = torch.cuda.current_stream().cuda_stream
    for label, decode in decodes.items():
        prefixes = cascade.prefixes if label == "cascade" else None
        decode.plan(stream, batches[0].tables, batches[0].rows, batches[0].lengths, prefixes=prefixes)
    torch.cuda.synchronize()

    def plain(stream: int, i: int) -> None:
        decodes["plain"](stream, 0, q, out, batches[i % len(batches)].tables, B)

    def prefix(stream: int, i: int) -> None:
        cascade(stream, 0, q, batches[i % len(batches)].tables)

    def both(stream: int, i: int) -> None:
        prefix(stream, i)
        tables = batches[i % len(batches)].tables
        decodes["cascade"](stream, 0, q, out, tables, B, prefix_parts=cascade.parts)

    launches, error = max(8, len(batches)), 0.0
    others = {"plain": graph_us(plain, launches), "prefix": graph_us(prefix, launches)}
    us = graph_us(both, launches)
    last = batches[(launches - 1) % len(batches)]
    for sequence in {0, B // 2, B - 1}:
        expected = reference(pool, last, sequence, q[sequence].view(1, heads, head_dim))
        error = max(error, error_of(out[sequence].view(1, heads, head_dim), expected))
    size = pages * pool.layout.layer_bytes
    return Measurement(name, us, size / us / 1e6, size / STREAM_BYTES_PER_S * 1e6, error, others), pays


def measure_prefill(
    name: str, case: tuple[int, int, int], pool: FramePool, loader: DeviceLoader, *, both: bool
) -> Measurement:
    """Time one layer's attention of a step of chunks; `both`: also by the kernel that is not Hopper's."""
    sequences, new, length = case
    batch = batches_of([length] * sequences, pool)[0]
    tokens = sequences * new
    counts = torch.full((sequences,), new, dtype=torch.int32, device="cuda")
    starts = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * new
    blocks = sequences * -(-new * HEADS // KV_HEADS // 128)
    q = torch.randn(tokens, HEADS * HEAD_DIM, device="cuda").bfloat16()
    out = torch.empty_like(q)
    check = min(new, 256)  # the last tokens of the last sequence
    expected = reference(pool, batch, sequences - 1, q[-check:].view(check, HEADS, HEAD_DIM))
    times, error = {}, 0.0
    for label, portable in (("chosen", False), ("portable", True))[: 2 if both else 1]:
        prefill = PagedPrefill(loader, pool, HEADS, tokens, portable=portable)
        prefill.plan(torch.cuda.current_stream().cuda_stream, counts, batch.lengths, blocks)
        torch.cuda.synchronize()

        def launch(stream: int, i: int, prefill: PagedPrefill = prefill) -> None:
            prefill(stream, 0, q, out, batch.tables, batch.rows, batch.lengths, starts, blocks)

        times[label] = graph_us(launch, 8)
        error = max(error, error_of(out[-check:].view(check, HEADS, HEAD_DIM), expected))
    us = times.pop("chosen")
    seen = new * (length - new) + new * (new + 1) / 2  # pairs of a query and a key
    flops = 4 * HEADS * HEAD_DIM * seen * sequences
    return Measurement(name, us, flops / us / 1e6, flops / 780e12 * 1e6, error, times)


def measure_small(loader: DeviceLoader) -> dict[str, tuple[float, float]]:
    """(microseconds, bytes) of a launch of what stands between the matrices, at 256 rows of the 8B shape."""
    T, hidden, intermediate, heads = 256, 4096, 12288, HEADS + 2 * KV_HEADS
    found: dict[str, tuple[float, float]] = {}

    def tensors(count: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
        return [torch.randn(*shape, device="cuda").to(dtype) for _ in range(count)]

    norm, weight = RmsNorm(loader, torch.bfloat16, hidden, 1e-5), torch.ones(hidden, device="cuda").bfloat16()
    xs, residuals, outs = (tensors(64, T, hidden) for _ in range(3))
    us = graph_us(lambda stream, i: norm(stream, xs[i], residuals[i], weight, outs[i]), 64)
    found["rms_norm 256 x 4,096"] = us, 4 * T * hidden * 2

    silu = SiluMul(loader, torch.bfloat16, intermediate)
    gates, products = tensors(24, T, 2 * intermediate), tensors(24, T, intermediate)
    us = graph_us(lambda stream, i: silu(stream, gates[i], products[i]), 24)
    found["silu_mul 256 x 12,288"] = us, 3 * T * intermediate * 2

    pool = random_pool(4096)
    angles = torch.ones(1024, HEAD_DIM // 2, device="cuda")
    append = KvAppend(loader, pool, HEADS, angles, angles, 1e-5)
    batches = [batch_of([1024] * T, torch.arange(T * 64) % 4096)]
    qkvs, failed = tensors(32, T, heads * HEAD_DIM), torch.zeros(T, dtype=torch.int32, device="cuda")
    positions, width, rows, tables = batches[0].lengths - 1, HEADS * HEAD_DIM, batches[0].rows, batches[0].tables

    def launch_append(stream: int, i: int) -> None:
        append(stream, 0, qkvs[i], qkvs[i][:, :width], None, rows, positions, tables, failed)

    found["kv_append 256 rows"] = graph_us(launch_append, 32), T * heads * HEAD_DIM * 2 * 2
    return found


Results = dict[str, dict[str, float]]


def print_decodes(pool: FramePool, loader: DeviceLoader, results: Results, *, all_shapes: bool) -> None:
    print(f"{'decode':24} {'us':>8} {'TB/s':>6} {'floor':>8} {'share':>6} {'error':>8}   other shapes, us")
    for name, lengths in DECODES.items():
        row = measure_decode(name, lengths, pool, loader, all_shapes=all_shapes)
        others = "  ".join(f"{label} {us:.1f}" for label, us in row.others.items())
        print(
            f"{name:24} {row.microseconds:8.1f} {row.rate:6.2f} {row.floor_us:8.1f} {row.share:6.0%} "
            f"{row.error:8.1e}   {others}",
            flush=True,
        )
        results[f"decode {name}"] = row.numbers() | {"TB/s": round(row.rate, 2)}


def print_shorts(loader: DeviceLoader, results: Results, *, all_shapes: bool) -> None:
    print(f"{'short contexts':34} {'us':>8} {'TB/s':>6} {'floor':>8} {'share':>6} {'error':>8}   other shapes, us")
    for shape, (heads, kv_heads, head_dim) in SHAPE_HEADS.items():
        pool = random_pool(30_000, kv_heads, head_dim)
        for name, lengths in SHORTS.items():
            row = measure_decode(name, lengths, pool, loader, all_shapes=all_shapes, heads=heads)
            others = "  ".join(f"{label} {us:.1f}" for label, us in row.others.items())
            print(
                f"{shape + ' ' + name:34} {row.microseconds:8.1f} {row.rate:6.2f} {row.floor_us:8.1f} {row.share:6.0%} "
                f"{row.error:8.1e}   {others}",
                flush=True,
            )
            results[f"short {shape} {name}"] = row.numbers()


def print_cascades(loader: DeviceLoader, results: Results) -> None:
    print(
        f"{'shared beginnings':40} {'us':>8} {'plain':>8} {'gain':>5} {'prefix':>8} {'floor':>8} {'error':>8}   chosen"
    )
    for shape, (heads, kv_heads, head_dim) in SHAPE_HEADS.items():
        pool = random_pool(30_000, kv_heads, head_dim)
        for name, groups in CASCADES.items():
            row, pays = measure_cascade(name, groups, pool, loader, heads)
            plain, prefix = row.others["plain"], row.others["prefix"]
            print(
                f"{shape + ' ' + name:40} {row.microseconds:8.1f} {plain:8.1f} {plain / row.microseconds:5.2f} "
                f"{prefix:8.1f} {row.floor_us:8.1f} {row.error:8.1e}   {'yes' if pays else 'no'}",
                flush=True,
            )
            parts = {"plain_us": round(plain, 1), "prefix_us": round(prefix, 1)}
            results[f"cascade {shape} {name}"] = row.numbers() | parts


def print_prefills(pool: FramePool, loader: DeviceLoader, results: Results, *, both: bool) -> None:
    print(f"{'prefill':24} {'us':>8} {'TF/s':>6} {'floor':>8} {'share':>6} {'error':>8}   by mma.sync, us")
    for name, case in PREFILLS.items():
        row = measure_prefill(name, case, pool, loader, both=both)
        others = "  ".join(f"{us:.1f}" for us in row.others.values())
        print(
            f"{name:24} {row.microseconds:8.1f} {row.rate:6.0f} {row.floor_us:8.1f} {row.share:6.0%} "
            f"{row.error:8.1e}   {others}",
            flush=True,
        )
        results[f"prefill {name}"] = row.numbers() | {"TFLOP/s": round(row.rate)}


def print_small(loader: DeviceLoader, results: Results) -> None:
    print(f"{'small':40} {'us':>8} {'TB/s':>6}")
    for name, (us, size) in measure_small(loader).items():
        print(f"{name:40} {us:8.1f} {size / us / 1e6:6.2f}", flush=True)
        results[name] = {"us": round(us, 1), "TB/s": round(size / us / 1e6, 2)}


TABLES = ("decode", "short", "cascade", "prefill", "small", "sampling")


def main() -> None:
    """Print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the shape that is chosen by itself, and less data")
    parser.add_argument("--only", default=",".join(TABLES), help=f"which tables, of {', '.join(TABLES)}")
    parser.add_argument("--plot", type=Path, help="draw a picture of ours beside the peers' (needs matplotlib)")
    parser.add_argument("--drawn", type=Path, metavar="FILE", help="measure nothing, draw these results")
    arguments = parser.parse_args()
    if arguments.drawn:
        plot(json.loads(arguments.drawn.read_text())["results"], arguments.plot)
        return
    tables = arguments.only.split(",")
    if not set(tables) <= set(TABLES):
        parser.error(f"--only {arguments.only}: the tables are {', '.join(TABLES)}")
    loader = DeviceLoader()
    results: Results = {}
    if "short" in tables:
        print_shorts(loader, results, all_shapes=not arguments.quick)
    if "cascade" in tables:
        print_cascades(loader, results)
    if "decode" in tables or "prefill" in tables:
        pool = random_pool(70_000)
        if "decode" in tables:
            print_decodes(pool, loader, results, all_shapes=not arguments.quick)
        if "prefill" in tables:
            print_prefills(pool, loader, results, both=not arguments.quick)
        del pool
    if "small" in tables:
        print_small(loader, results)
    if "sampling" in tables:
        print(f"{'sampling':44} {'us':>8} {'reads':>6}")
        for name, us, reads in measure_sampling(loader, all_sizes=not arguments.quick):
            print(f"{name:44} {us:8.1f} {reads:6.2f}", flush=True)
            results[name] = {"us": round(us, 1), "reads": round(reads, 2)}
    print(json.dumps(results))
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
