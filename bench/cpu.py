"""This server beside transformers' `generate`, on the CPU, on the same rows in the same run.

    make bench-cpu          or  python -m bench.cpu [--rows 40] [--model smollm2] [--dtype auto] [--skip-transformers]

The first 40 rows of chat-1000 (8 of them one by one), prompts cut at 256 tokens and outputs at 128, ends ignored.
Ours: the whole server over HTTP with streaming, `c` requests at a time, the next one begun when one ends.
transformers: `generate` in batches of `b`, padded on the left; a batch runs as long as its longest output, and only
tokens that a row asked for count. Both take turns, so that a busy neighbour meets both; compare ratios, not absolute
numbers of different runs.

The last line printed is one JSON object:
{"c1": {"tok_s", "ttft_p50_ms", "itl_p50_ms"}, "c8": …, "c32": …, "transformers": {"b1_tok_s", …}, "ratio": {"c1", …},
…}
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench import workload
from bench.server_process import serving
from model.config import read_config
from model.cpu_threads import usable_cores
from model.source import resolve

LEVELS = (1, 8, 32)
PROMPT_LIMIT, OUTPUT_LIMIT = 256, 128
FEW = 8
"""Rows of the run with one request at a time, of both: at transformers' 10 tokens a second all 40 would take minutes.
"""


@dataclass
class Times:
    """What the clients saw at one level of concurrency."""

    tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


def rows(model: str, count: int, level: int) -> list[workload.Item]:
    """The rows, each token id raised by `level`: no level finds the prompts of the one before in the prefix cache."""
    vocabulary = read_config(resolve(model).folder).vocabulary
    return [
        workload.Item(
            [(token + level) % vocabulary for token in item.prompt_ids[:PROMPT_LIMIT]],
            min(item.output_len, OUTPUT_LIMIT),
            1,
        )
        for item in workload.load("chat-1000", vocabulary, FEW if level == 1 else count)
    ]


# --- Ours ------------------------------------------------------------------------------------------------------------


async def one_request(session: aiohttp.ClientSession, url: str, item: workload.Item, times: Times) -> None:
    body = {
        "model": "bench",
        "prompt": item.prompt_ids,
        "max_tokens": item.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = last = time.perf_counter()
    first = True
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"the server answered {event}")
            if event.get("choices"):
                now = time.perf_counter()
                (times.ttft_s if first else times.gaps_s).append(now - last)
                first, last = False, now
            elif event.get("usage"):
                if event["usage"]["completion_tokens"] != item.output_len:
                    raise SystemExit(f"asked for {item.output_len} tokens, got {event['usage']}")
                times.tokens += item.output_len
    assert last > begun, "no event carried a token"


async def ours(url: str, items: list[workload.Item], concurrency: int) -> dict[str, float]:
    times, waiting = Times(), list(reversed(items))

    async def client(session: aiohttp.ClientSession) -> None:
        while waiting:
            await one_request(session, url, waiting.pop(), times)

    begun = time.perf_counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await asyncio.gather(*(client(session) for _ in range(concurrency)))
    return {
        "tok_s": round(times.tokens / (time.perf_counter() - begun), 1),
        "ttft_p50_ms": round(1000 * statistics.median(times.ttft_s), 1),
        "itl_p50_ms": round(1000 * statistics.median(times.gaps_s), 1),
    }


# --- transformers ----------------------------------------------------------------------------------------------------


class Peer:
    """transformers' eager `generate` on the same weights."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        import transformers

        self.torch = torch
        chosen = {"auto": None, "bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
        if chosen is None:
            from model.cpu_executor import choose_dtype

            chosen = choose_dtype(read_config(resolve(model).folder))
        torch.set_num_threads(usable_cores())
        self.dtype = str(chosen).removeprefix("torch.")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(resolve(model).folder, dtype=chosen).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def tok_s(self, items: list[workload.Item], batch: int) -> float:
        torch, done, begun = self.torch, 0, time.perf_counter()
        for start in range(0, len(items), batch):
            part = items[start : start + batch]
            longest = max(len(item.prompt_ids) for item in part)
            ids = torch.zeros((len(part), longest), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, item in enumerate(part):
                ids[row, longest - len(item.prompt_ids) :] = torch.tensor(item.prompt_ids)
                mask[row, longest - len(item.prompt_ids) :] = 1
            wanted = max(item.output_len for item in part)
            with torch.inference_mode():
                out = self.model.generate(ids, attention_mask=mask, max_new_tokens=wanted, do_sample=False)
            assert out.shape[1] == longest + wanted
            done += sum(item.output_len for item in part)
        return round(done / (time.perf_counter() - begun), 1)


# --- Both ------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.cpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--skip-transformers", action="store_true")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    peer: dict[str, float] = {}
    huge_pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # as `make serve` starts it
    with serving(["--model", arguments.model, "--dtype", arguments.dtype], huge_pages) as url:
        other = None if arguments.skip_transformers else Peer(arguments.model, arguments.dtype)
        warm_up = rows(arguments.model, 1, 0)
        asyncio.run(ours(url, warm_up, 1))
        if other:
            other.tok_s(warm_up, 1)
        for level in LEVELS:
            items = rows(arguments.model, arguments.rows, level)
            result[f"c{level}"] = asyncio.run(ours(url, items, level))
            print(f"c{level}: {result[f'c{level}']}", file=sys.stderr)
            if other:
                peer[f"b{level}_tok_s"] = other.tok_s(items, level)
                print(f"transformers b{level}: {peer[f'b{level}_tok_s']} tok/s", file=sys.stderr)
    if other:
        result["transformers"] = peer
        result["ratio"] = {f"c{c}": round(result[f"c{c}"]["tok_s"] / peer[f"b{c}_tok_s"], 2) for c in LEVELS}
        result["dtype"] = other.dtype
    result["server_peak_rss_mb"] = round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
    result["cores"] = usable_cores()
    result["load_average"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
