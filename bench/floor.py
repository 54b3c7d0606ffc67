"""Physical floor of a workload on one GPU: what a perfect engine would need.

Each step costs max(weight bytes / bandwidth, FLOP / matrix rate) for the linear layers, plus the K/V bytes that decode
attention reads, plus the FLOP of prefill attention, plus a kernel boundary for 8 kernels a layer. Steps admit whole
prompts greedily under a token budget. Nothing else costs anything: no host, no sampling, no activations. Defaults are
rates measured on an H200.

    python -m bench.floor WORKLOAD.jsonl --model 8b|smol|qwen06b
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHAPES = {  # hidden, layers, query heads, kv heads, head_dim, intermediate, vocabulary
    "8b": (4096, 32, 32, 8, 128, 14336, 128256),
    "smol": (576, 30, 9, 3, 64, 1536, 49152),
    "qwen06b": (1024, 28, 16, 8, 128, 3072, 151936),
}
KERNELS_PER_LAYER = 8
BF16_BYTES = 2


@dataclass(frozen=True)
class Rates:
    """What the device reaches: bytes read a second, FLOP a second, seconds from one kernel to the next in a graph."""

    bandwidth: float = 4.53e12
    flops: float = 780e12
    boundary_s: float = 0.65e-6


def step_floor_s(shape: str, rates: Rates, *, decodes: int, context: float, prefill: int, squares: float) -> float:
    """Seconds of one step: `decodes` rows over `context` keys in all; `prefill` tokens, attention over `squares`."""
    hidden, layers, heads, kv_heads, head_dim, intermediate, vocabulary = SHAPES[shape]
    per_layer = hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden + 3 * hidden * intermediate
    head, kv_bytes = hidden * vocabulary, 2 * kv_heads * head_dim * BF16_BYTES * layers
    tokens = decodes + prefill
    body_s = max(per_layer * layers * BF16_BYTES / rates.bandwidth, 2 * per_layer * layers * tokens / rates.flops)
    head_s = max(head * BF16_BYTES / rates.bandwidth, 2 * head * max(decodes, 1) / rates.flops)
    attention_s = context * kv_bytes / rates.bandwidth + squares * 2 * heads * head_dim * layers / rates.flops
    return body_s + head_s + attention_s + layers * KERNELS_PER_LAYER * rates.boundary_s


def replay(
    rows: list[dict[str, int]], shape: str, rates: Rates, *, max_seqs: int, budget: int
) -> tuple[float, int, int]:
    """Run a workload step by step: (seconds, steps, output tokens)."""
    pending = [
        (r["prompt_len"], r["output_len"], r.get("prefix_len", 0), r.get("prefix_id"), r.get("n", 1)) for r in rows
    ]
    pending.reverse()
    seen: set[int] = set()
    context, left = np.zeros(0), np.zeros(0, int)
    total, steps, out = 0.0, 0, 0
    while pending or len(context):
        prefill, squares = 0, 0.0
        new_context: list[int] = []
        new_left: list[int] = []
        while pending and len(context) + len(new_context) < max_seqs:
            prompt, output, prefix, prefix_id, n = pending[-1]
            todo = prompt - prefix if prefix_id in seen else prompt
            if prefill and prefill + todo > budget:
                break
            pending.pop()
            prefill += todo
            squares += prompt**2 - (prompt - todo) ** 2
            if prefix_id is not None:
                seen.add(prefix_id)
            new_context += [prompt] * n
            new_left += [output] * n
        total += step_floor_s(
            shape, rates, decodes=len(context), context=float(context.sum()), prefill=prefill, squares=squares
        )
        steps += 1
        out += len(context) + len(new_context)
        context = np.concatenate([context + 1, np.array(new_context, float) + 1])
        left = np.concatenate([left - 1, np.array(new_left, int) - 1])
        alive = left > 0
        context, left = context[alive], left[alive]
    return total, steps, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--model", default="8b", choices=SHAPES)
    parser.add_argument("--max-seqs", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--bandwidth", type=float, default=Rates.bandwidth)
    parser.add_argument("--flops", type=float, default=Rates.flops)
    parser.add_argument("--boundary-s", type=float, default=Rates.boundary_s)
    a = parser.parse_args()
    rows = [json.loads(line) for line in a.workload.read_text().splitlines()]
    rates = Rates(a.bandwidth, a.flops, a.boundary_s)
    total, steps, out = replay(rows, a.model, rates, max_seqs=a.max_seqs, budget=a.budget)
    answer = {"workload": a.workload.name, "model": a.model, "floor_s": round(total, 3), "steps": steps}
    print(json.dumps({**answer, "output_tokens": out, "output_tok_s": round(out / total)}))


if __name__ == "__main__":
    main()
