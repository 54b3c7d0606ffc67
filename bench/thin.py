"""The matrix products of few rows alone: every matrix of a layer beside cuBLAS, and whole layers without attention.

    python -m bench.thin [--rows 1,4,8,16,32] [--shapes smol,qwen06b,8b]     prints tables, and last one line of JSON

Times are medians of a CUDA graph's replays over more weights than the L2 holds. A thin kernel does the norm, addition
or gate around its matrix too, so cuBLAS stands there twice: the product alone, and with the kernels that surround it.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.kernels import L2_BYTES, STREAM_BYTES_PER_S, graph_us
from bench.offline import SHAPES
from cuda.launch import DeviceLoader
from cuda.rms_norm import RmsNorm
from cuda.silu_mul import SiluMul
from cuda.thin_linear import ROW_CLASSES, ThinAdd, ThinGate, ThinLogits, ThinProduct, ThinWorkspace, squares_of

Launch = Callable[[int, Tensor], None]
"""launch(stream, weight)"""

DTYPE = torch.bfloat16
EPSILON = 1e-5


@dataclass
class Matrix:
    """One matrix of a network: its weights, more than the L2 holds, and three ways to multiply by them."""

    name: str
    weights: Tensor  # (copies, N, K)
    thin: Launch
    product: Launch  # cuBLAS alone
    plain: Launch  # cuBLAS, and what the thin kernel does besides

    @property
    def size_bytes(self) -> int:
        return self.weights[0].nbytes


def matrices(shape: str, rows: int, loader: DeviceLoader) -> list[Matrix]:
    """In the order of a layer; the head last."""
    c = SHAPES[shape]
    hidden, width, head_dim = c["hidden_size"], c["intermediate_size"], c.get("head_dim", 0)
    heads, kv_heads, vocabulary = c["num_attention_heads"], c["num_key_value_heads"], c["vocab_size"]
    head_dim = head_dim or hidden // heads
    work, more = ThinWorkspace("cuda"), {"rows": ROW_CLASSES[-1]}
    normed = {"epsilon": EPSILON, **more}

    def numbers(*size: int) -> Tensor:
        return torch.empty(size, dtype=DTYPE, device="cuda").normal_(0, 0.02)

    def weights(outputs: int, inputs: int) -> Tensor:
        copies = max(2, round(4 * L2_BYTES / (outputs * inputs * 2)))
        return numbers(min(copies, c["num_hidden_layers"] * 8), outputs, inputs)

    stream_x, other, scale = numbers(rows, hidden), numbers(rows, hidden), numbers(hidden)
    squares = torch.ones(rows, squares_of(hidden), device="cuda")
    norm, silu = RmsNorm(loader, DTYPE, hidden, EPSILON), SiluMul(loader, DTYPE, width)
    picks = torch.arange(rows, dtype=torch.int32, device="cuda")

    def multiply(x: Tensor, out: Tensor, stream: int, weight: Tensor) -> None:
        torch.mm(x, weight.t(), out=out)

    def with_norm(out: Tensor, stream: int, weight: Tensor) -> None:
        norm(stream, stream_x, other, scale, stream_x)
        torch.mm(stream_x, weight.t(), out=out)

    def project(name: str, outputs: int) -> Matrix:
        thin, out = ThinProduct(loader, work, DTYPE, outputs, hidden, **normed), numbers(rows, outputs)

        def run(stream: int, weight: Tensor) -> None:
            thin(stream, stream_x, (scale, squares), weight, None, out)

        return Matrix(name, weights(outputs, hidden), run, partial(multiply, stream_x, out), partial(with_norm, out))

    def add(name: str, inputs: int) -> Matrix:  # cuBLAS adds in the norm that follows
        thin, x, out = (
            ThinAdd(loader, work, DTYPE, hidden, inputs, **more),
            numbers(rows, inputs),
            numbers(rows, hidden),
        )

        def run(stream: int, weight: Tensor) -> None:
            thin(stream, x, weight, None, other, squares)

        both = partial(multiply, x, out)
        return Matrix(name, weights(hidden, inputs), run, both, both)

    def gate() -> Matrix:
        thin, gated = ThinGate(loader, work, DTYPE, width, hidden, **normed), numbers(rows, width)
        out = numbers(rows, 2 * width)

        def run(stream: int, weight: Tensor) -> None:
            thin(stream, stream_x, (scale, squares), weight, None, gated)

        def plain(stream: int, weight: Tensor) -> None:
            with_norm(out, stream, weight)
            silu(stream, out, gated)

        return Matrix("gate_up", weights(2 * width, hidden), run, partial(multiply, stream_x, out), plain)

    def head() -> Matrix:
        thin = ThinLogits(loader, work, DTYPE, vocabulary, hidden, **more)
        out = torch.empty(rows, vocabulary, dtype=torch.float32, device="cuda")

        def run(stream: int, weight: Tensor) -> None:
            thin(stream, stream_x, picks, weight, out)

        def plain(stream: int, weight: Tensor) -> None:
            torch.mm(stream_x, weight.t(), out_dtype=torch.float32, out=out)

        return Matrix("head", weights(vocabulary, hidden), run, plain, plain)

    qkv = (heads + 2 * kv_heads) * head_dim
    return [project("qkv", qkv), add("o", heads * head_dim), gate(), add("down", width), head()]


def measure(loader: DeviceLoader, shapes: list[str], rows: list[int]) -> dict[str, dict[str, float]]:
    """Print a line for every matrix, and one for the four of a layer after each other. Returns them, by name."""
    found: dict[str, dict[str, float]] = {}
    print(f"{'thin':28} {'us':>8} {'TB/s':>6} {'floor':>8} {'cuBLAS':>8} {'+ around':>9}", flush=True)

    def report(name: str, size: int, launches: int, ways: Sequence[Callable[[int, int], None]]) -> None:
        us, product, plain = (graph_us(way, launches) for way in ways)
        floor = size / STREAM_BYTES_PER_S * 1e6
        print(f"{name:28} {us:8.2f} {size / us / 1e6:6.2f} {floor:8.2f} {product:8.2f} {plain:9.2f}", flush=True)
        found[name] = {
            "us": round(us, 2),
            "TB/s": round(size / us / 1e6, 2),
            "cublas_us": round(product, 2),
            "plain_us": round(plain, 2),
        }

    for shape in shapes:
        for count in rows:
            every = matrices(shape, count, loader)
            for m in every:

                def at(launch: Launch, stream: int, i: int, m: Matrix = m) -> None:
                    launch(stream, m.weights[i % len(m.weights)])

                ways = [partial(at, launch) for launch in (m.thin, m.product, m.plain)]
                report(f"{shape} {m.name}, {count} rows", m.size_bytes, max(8, len(m.weights)), ways)
            layer = every[:-1]

            def all_of(way: str, stream: int, i: int, layer: list[Matrix] = layer) -> None:
                for m in layer:
                    getattr(m, way)(stream, m.weights[i % len(m.weights)])

            size = sum(m.size_bytes for m in layer)
            ways = [partial(all_of, way) for way in ("thin", "product", "plain")]
            report(f"{shape} layer, {count} rows", size, max(8, *(len(m.weights) for m in layer)), ways)
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
