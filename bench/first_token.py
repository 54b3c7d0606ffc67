"""First tokens of requests that come one at a time, of servers of several checkouts beside each other, turn about.

    pagewalk bench first-token --shape 8b [--requests 80] [--rounds 4]
    pagewalk bench first-token --tree before=../before --tree after=. -- --front-ends 4      flags for each server

Hosts and cards differ by more than what a change brings, so what is compared runs in one go: all servers are started
first and left alone for --settle seconds, in which they capture graphs; then, in each round, each gets its share of the
requests, on a connection for each (as bench/loadgen.py has them) and on one that is kept. A shape with random weights,
no page cache, prompts as token ids, greedy. Milliseconds from the request's begin to the first event that carries a
token: a line each, and one of JSON last. A checkout may be given twice, for the noise.
"""

import argparse
import gc
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from bench import loadgen
from bench.offline import SHAPES
from bench.serve import RANDOM_WEIGHTS, shape_folder
from bench.server_process import NAME, serving

KINDS = {"new": True, "kept": False}  # connections -> whether the client closes them
MEMORY = ("--kv-cache-memory-bytes", "2GiB", "--swap-memory-bytes", "1GiB")  # several servers fit on one card
OUTPUT = 4  # tokens
FIRST_USES = 2  # requests of a share that are not counted


def trees_of(given: list[str]) -> dict[str, Path]:
    """LABEL=PATH, or PATH, by label; one that comes again has a mark."""
    found: dict[str, Path] = {}
    for each in given:
        label, _, path = each.rpartition("=")
        label = label or path
        while label in found:
            label += "'"
        found[label] = Path(path).resolve()
    return found


def order_of(labels: list[str], turn: int) -> list[str]:
    """Whoever was first in a round is last in the next one."""
    first = turn % len(labels)
    return labels[first:] + labels[:first]


async def share(url: str, rows: list[dict[str, Any]], vocabulary: int, *, closes: bool) -> list[float]:
    """Milliseconds to the first token of each row but the first FIRST_USES."""
    options = argparse.Namespace(model=NAME, vocab=vocabulary, temperature=0.0, extra_body={})
    found: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=closes)) as session:
        for row in rows:
            result = loadgen.Result(row["id"], OUTPUT, 1, 0.0)
            await loadgen.one_request(session, url + "/v1/completions", loadgen.request_body(options, row), result)
            if result.error:
                raise SystemExit(f"a request failed: {result.error}")
            found.append((result.events[0][0] - result.begun) * 1e3)
    return found[FIRST_USES:]


async def measure(
    urls: dict[str, str], vocabulary: int, chosen: argparse.Namespace
) -> dict[tuple[str, str], list[float]]:
    """By label and kind of connection."""
    each, number = -(-chosen.requests // chosen.rounds) + FIRST_USES, 0
    found: dict[tuple[str, str], list[float]] = {(label, kind): [] for label in urls for kind in KINDS}
    gc.disable()
    for turn in range(chosen.rounds):
        for kind, closes in KINDS.items():
            for label in order_of(list(urls), turn):
                numbers = range(number, number := number + each)
                rows = [{"id": i, "seed": i, "prompt_len": chosen.prompt_len, "output_len": OUTPUT} for i in numbers]
                found[label, kind] += await share(urls[label], rows, vocabulary, closes=closes)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", metavar="[LABEL=]PATH", help="a checkout; without it, this one")
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="random weights of this shape")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens")
    parser.add_argument("--requests", type=int, default=80, help="of each checkout and kind of connection")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--settle", type=float, default=20.0, help="seconds between the start and the first request")
    parser.add_argument("flags", nargs="*", help="for each server, behind --")
    chosen = parser.parse_args()
    with ExitStack() as stack:
        model = stack.enter_context(shape_folder(chosen.shape))
        flags, urls = ["--model", str(model), *RANDOM_WEIGHTS, *MEMORY, *chosen.flags], {}
        for label, tree in trees_of(chosen.tree or ["."]).items():
            urls[label] = stack.enter_context(serving(flags, tree=tree))
        time.sleep(chosen.settle)
        found = uvloop.run(measure(urls, SHAPES[chosen.shape]["vocab_size"], chosen))
    lines = []
    for (label, kind), times in found.items():
        tenths = statistics.quantiles(times, n=10)
        lines.append({"tree": label, "connection": kind, "requests": len(times), "prompt_len": chosen.prompt_len})
        lines[-1] |= {"p10": round(tenths[0], 3), "p50": round(statistics.median(times), 3), "p90": round(tenths[8], 3)}
        figures = "  ".join(f"{name} {lines[-1][name]:7.3f}" for name in ("p10", "p50", "p90"))
        print(f"{label:24} {kind:4}  {figures} ms", flush=True)
    print(json.dumps({"network": chosen.shape, "flags": chosen.flags, "results": lines}))


if __name__ == "__main__":
    main()
