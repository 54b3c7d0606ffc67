"""The matrix products of few rows alone: every matrix of a layer beside cuBLAS, and whole layers without attention.

    python -m bench.thin [--rows 1,4,8,16,32] [--shapes smol,qwen06b,8b]     prints tables, and last one line of JSON

Times are medians of a CUDA graph's replays over more weights than the L2 holds. A thin kernel does the norm, addition
or gate around its matrix too, so cuBLAS stands there twice: the product alone, and with the kernels that surround it.
So does batch_linear, with the norm in front of it; of a gate it does SiLU. A way that does not know so many rows has no
time. cuBLAS is torch.mm; for 29 to 208 rows a step takes cuBLASLt's choice (model/blas_choice.py), and so does this.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.kernels import L2_BYTES, STREAM_BYTES_PER_S, graph_us
from bench.offline import SHAPES
from cuda.batch_linear import TOKENS, BatchLinear
from cuda.launch import DeviceLoader
from cuda.rms_norm import RmsNorm
from cuda.silu_mul import SiluMul
from cuda.thin_linear import ROW_CLASSES, ThinAdd, ThinGate, ThinLogits, ThinProduct, ThinWorkspace, squares_of
from model.blas_choice import LT_TOKENS, products_by_lt

Launch = Callable[[int, Tensor], None]
"""launch(stream, weight)"""

DTYPE = torch.bfloat16
EPSILON = 1e-5


@dataclass
class Matrix:
    """One matrix of a network: its weights, more than the L2 holds, and the ways to multiply by them."""

    name: str
    weights: Tensor  # (copies, N, K)
    thin: Launch | None
    product: Launch  # cuBLAS alone
    plain: Launch  # cuBLAS, and what the thin kernel does besides
    batch: Launch | None = None  # batch_linear, and the norm in front of it, which adds up its parts

    @property
    def size_bytes(self) -> int:
        return self.weights[0].nbytes


def matrices(shape: str, rows: int, loader: DeviceLoader) -> list[Matrix]:
    """In the order of a layer; the head last."""
    c = SHAPES[shape]
    hidden, width, head_dim = c["hidden_size"], c["intermediate_size"], c.get("head_dim", 0)
    heads, kv_heads, vocabulary = c["num_attention_heads"], c["num_key_value_heads"], c["vocab_size"]
    head_dim = head_dim or hidden // heads
    qkv = (heads + 2 * kv_heads) * head_dim
    work, more = ThinWorkspace("cuda"), {"rows": ROW_CLASSES[-1]}
    normed = {"epsilon": EPSILON, **more}

    def numbers(*size: int) -> Tensor:
        return torch.empty(size, dtype=DTYPE, device="cuda").normal_(0, 0.02)

    def weights(outputs: int, inputs: int) -> Tensor:
        copies = max(2, round(4 * L2_BYTES / (outputs * inputs * 2)))
        return numbers(min(copies, c["num_hidden_layers"] * 8), outputs, inputs)

    batch: BatchLinear | None = None
    if rows <= TOKENS[-1] and BatchLinear.is_possible(loader, DTYPE):
        batch = BatchLinear(
            loader, DTYPE, "cuda", weights=4 * 8 * c["num_hidden_layers"], inputs=3, outputs=max(qkv, hidden)
        )
    has_thin = rows <= ROW_CLASSES[-1]
    stream_x, other, scale = numbers(rows, hidden), numbers(rows, hidden), numbers(hidden)
    squares = torch.ones(rows, squares_of(hidden), device="cuda")
    norm, silu = RmsNorm(loader, DTYPE, hidden, EPSILON), SiluMul(loader, DTYPE, width)
    picks = torch.arange(rows, dtype=torch.int32, device="cuda")

    before: list[Tensor] = []  # parts that the product before a norm gives
    if batch is not None:
        batch.keep_input(stream_x)

    def multiply(x: Tensor, out: Tensor, stream: int, weight: Tensor) -> None:
        torch.mm(x, weight.t(), out=out)

    def batched(every: Tensor, x: Tensor, gated: Tensor | None = None) -> Launch | None:  # gated: of a gate, its result
        if batch is None:
            return None
        for weight in every:
            batch.keep(weight, gate=gated is not None)
        if x is not stream_x:
            batch.keep_input(x)

        def run(stream: int, weight: Tensor) -> None:
            if x is stream_x:
                norm(stream, before[0], other, scale, x)
            if gated is None:
                batch.product(stream, x, weight, None)
            else:
                batch.gated(stream, x, weight, None, gated)

        if gated is None and x is not stream_x:  # what the norm adds up lies where it always will
            before.append(batch.product(torch.cuda.current_stream().cuda_stream, x, every[0], None))
        return run

    def with_norm(out: Tensor, stream: int, weight: Tensor) -> None:
        norm(stream, stream_x, other, scale, stream_x)
        torch.mm(stream_x, weight.t(), out=out)

    def project(name: str, outputs: int) -> Matrix:
        thin, out = ThinProduct(loader, work, DTYPE, outputs, hidden, **normed), numbers(rows, outputs)

        def run(stream: int, weight: Tensor) -> None:
            thin(stream, stream_x, (scale, squares), weight, None, out)

        every = weights(outputs, hidden)
        product, plain = partial(multiply, stream_x, out), partial(with_norm, out)
        return Matrix(name, every, run if has_thin else None, product, plain, batched(every, stream_x))

    def add(name: str, inputs: int) -> Matrix:  # cuBLAS adds in the norm that follows
        thin, x, out = (
            ThinAdd(loader, work, DTYPE, hidden, inputs, **more),
            numbers(rows, inputs),
            numbers(rows, hidden),
        )

        def run(stream: int, weight: Tensor) -> None:
            thin(stream, x, weight, None, other, squares)

        both, every = partial(multiply, x, out), weights(hidden, inputs)
        return Matrix(name, every, run if has_thin else None, both, both, batched(every, x))

    def gate() -> Matrix:
        thin, gated = ThinGate(loader, work, DTYPE, width, hidden, **normed), numbers(rows, width)
        out = numbers(rows, 2 * width)

        def run(stream: int, weight: Tensor) -> None:
            thin(stream, stream_x, (scale, squares), weight, None, gated)

        def plain(stream: int, weight: Tensor) -> None:
            with_norm(out, stream, weight)
            silu(stream, out, gated)

        every = weights(2 * width, hidden)
        product = partial(multiply, stream_x, out)
        in_batch = batched(every, stream_x, gated)
        return Matrix("gate_up", every, run if has_thin else None, product, plain, in_batch)

    def head() -> Matrix:
        thin = ThinLogits(loader, work, DTYPE, vocabulary, hidden, **more)
        out = torch.empty(rows, vocabulary, dtype=torch.float32, device="cuda")

        def run(stream: int, weight: Tensor) -> None:
            thin(stream, stream_x, picks, weight, out)

        def plain(stream: int, weight: Tensor) -> None:
            torch.mm(stream_x, weight.t(), out_dtype=torch.float32, out=out)

        return Matrix("head", weights(vocabulary, hidden), run if has_thin else None, plain, plain)

    return [project("qkv", qkv), add("o", heads * head_dim), gate(), add("down", width), head()]


WAYS = ("thin", "batch", "product", "plain")


def _one(m: Matrix, way: str) -> Callable[[int, int], None] | None:
    launch: Launch | None = getattr(m, way)
    return None if launch is None else lambda stream, i: launch(stream, m.weights[i % len(m.weights)])


def _all(layer: list[Matrix], way: str) -> Callable[[int, int], None] | None:
    each = [launch for m in layer if (launch := _one(m, way)) is not None]
    if len(each) < len(layer):
        return None

    def run(stream: int, i: int) -> None:
        for launch in each:
            launch(stream, i)

    return run


def measure(loader: DeviceLoader, shapes: list[str], rows: list[int]) -> dict[str, dict[str, float]]:
    """Print a line for every matrix, and one for the four of a layer after each other. Returns them, by name."""
    found: dict[str, dict[str, float]] = {}
    print(f"{'us':28} {'thin':>8} {'batch':>8} {'floor':>8} {'cuBLAS':>8} {'+ around':>9}", flush=True)

    def report(name: str, size: int, launches: int, ways: dict[str, Callable[[int, int], None] | None]) -> None:
        us = {way: None if launch is None else round(graph_us(launch, launches), 2) for way, launch in ways.items()}
        floor = size / STREAM_BYTES_PER_S * 1e6
        thin, batch, product, plain = ("-" if us[way] is None else f"{us[way]:.2f}" for way in WAYS)
        print(f"{name:28} {thin:>8} {batch:>8} {floor:8.2f} {product:>8} {plain:>9}", flush=True)
        found[name] = {f"{way}_us": value for way, value in us.items() if value is not None}
        found[name]["floor_us"] = round(floor, 2)

    for shape in shapes:
        for count in rows:
            every = matrices(shape, count, loader)
            with products_by_lt(wanted=count in LT_TOKENS):
                for m in every:
                    ways = {way: _one(m, way) for way in WAYS}
                    report(f"{shape} {m.name}, {count} rows", m.size_bytes, max(8, len(m.weights)), ways)
                layer = every[:-1]
                size, launches = sum(m.size_bytes for m in layer), max(8, *(len(m.weights) for m in layer))
                report(f"{shape} layer, {count} rows", size, launches, {way: _all(layer, way) for way in WAYS})
            del every, layer
            torch.cuda.empty_cache()
    return found


def main() -> None:
    """Print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,8,16,32", help="rows of a step")
    parser.add_argument("--shapes", default="smol,qwen06b,8b", help=", ".join(SHAPES))
    arguments = parser.parse_args()
    rows = [int(n) for n in arguments.rows.split(",")]
    print(json.dumps(measure(DeviceLoader(), arguments.shapes.split(","), rows)))


if __name__ == "__main__":
    main()
