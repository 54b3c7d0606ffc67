"""Open-loop load generator for OpenAI-compatible /v1/completions servers (SSE streaming).

One client for every server that is compared. It replays the first rows of a JSONL workload
({"id", "seed", "prompt_len", "output_len"[, "n", "prefix_id", "prefix_len"]} a line), with prompts as
token ids from random.Random(seed), and prints one JSON line.

    python -m bench.loadgen --base-url http://127.0.0.1:8000 --model m --workload chat-1000.jsonl --vocab 128256 \\
        --rate 16 --limit 400

  --rate 16    Poisson arrivals, 16 a second on average, from a fixed seed: the same arrival times for every server
  --rate inf   everything at once
  --rate seq   one request after the other, one at a time

Several processes split the arrivals (row i goes to process i mod procs); each builds its request bodies before the
common start time. Only aiohttp and uvloop are needed, and nothing of this project: it runs beside any server.

Definitions
  ttft     request begun (a new connection for each request) -> first event that carries a token
  itl      gaps between consecutive token events of one choice, pooled over all requests
  tpot     per request: (last token event - first token event) / (tokens of a choice - 1)
  e2e      request begun -> end of the stream
  duration start of the run -> end of the last stream;  output_tok_s = output tokens of good requests / duration
  window_tok_s  the same rate over the last three quarters of the arrival time only (no ramp, no tail)
  tokens   from the server's "usage"; tokens_per_event above 1 means that the server put several tokens in one event
  send_lag how late the generator began a request;  client_cores  CPU of the busiest generator process / duration
Failures: HTTP status, error event, time-out, broken stream, or another number of tokens than asked for.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing as mp
import random
import resource
import statistics
import sys
import time
from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import aiohttp
import uvloop

now = time.perf_counter  # CLOCK_MONOTONIC: one time line for all processes of the machine


# ---------------------------------------------------------------- workload


def load_rows(path: str, limit: int) -> list[dict]:
    with Path(path).open(encoding="utf-8") as f:
        rows = [json.loads(line) for line in f if line.strip()]
    return rows[:limit] if limit else rows


def prompt_ids(row: dict, vocab: int) -> list[int]:
    ids: list[int] = []
    if "prefix_id" in row:
        rng = random.Random(row["prefix_id"])
        ids = [rng.randrange(vocab) for _ in range(row["prefix_len"])]
    rng = random.Random(row["seed"])
    return ids + [rng.randrange(vocab) for _ in range(row["prompt_len"] - len(ids))]


def arrivals(n: int, rate: float, seed: int) -> list[float]:
    """Start times in seconds; the first is 0."""
    if rate == float("inf"):
        return [0.0] * n
    rng, at, out = random.Random(seed), 0.0, []
    for _ in range(n):
        out.append(at)
        at += rng.expovariate(rate)
    return out


def request_body(args: argparse.Namespace, row: dict) -> bytes:
    body = {
        "model": args.model,
        "prompt": prompt_ids(row, args.vocab),
        "max_tokens": row["output_len"],
        "temperature": args.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if row.get("n", 1) > 1:
        body["n"] = row["n"]
    return json.dumps(body | args.extra_body, separators=(",", ":")).encode()


# ---------------------------------------------------------------- one request


@dataclass
class Result:
    id: int
    want: int  # tokens of one choice
    n: int
    at: float  # planned start
    begun: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    events: dict[int, array] = field(default_factory=dict)  # choice -> times of its token events
    error: str | None = None


async def one_request(session: aiohttp.ClientSession, url: str, body: bytes, res: Result) -> None:
    res.begun = now()
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as resp:
            if resp.status != 200:
                res.error = f"HTTP {resp.status}: {(await resp.text())[:200]}"
                return
            buf, done = b"", False
            async for chunk in resp.content.iter_any():
                t = now()
                *lines, buf = (buf + chunk).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    if line.rstrip() in (b"data: [DONE]", b"data:[DONE]"):
                        done = True
                        continue
                    event = json.loads(line[5:])
                    if "error" in event:
                        res.error = f"server error: {json.dumps(event['error'])[:200]}"
                        return
                    if usage := event.get("usage"):
                        res.tokens = usage["completion_tokens"]
                        res.prompt_tokens = usage["prompt_tokens"]
                    for choice in event["choices"]:
                        # an empty text without a finish reason is a token whose bytes are held back
                        if choice["text"] or choice.get("finish_reason") is None:
                            res.events.setdefault(choice.get("index", 0), array("d")).append(t)
        if not done:
            res.error = "stream without [DONE]"
        elif res.tokens != res.want * res.n:
            res.error = f"token count: {res.tokens} of {res.want * res.n}"
        elif not res.events:
            res.error = "no token event"
    except TimeoutError:
        res.error = "timeout"
    except (aiohttp.ClientError, OSError, ValueError, KeyError) as e:
        res.error = f"{type(e).__name__}: {e}"[:200]
    finally:
        res.ended = now()


# ---------------------------------------------------------------- processes


async def drive(args: argparse.Namespace, jobs: list[tuple[dict, float]], conn) -> None:
    url = args.base_url.rstrip("/") + args.path
    work = [(Result(r["id"], r["output_len"], r.get("n", 1), at), request_body(args, r)) for r, at in jobs]
    timeout = aiohttp.ClientTimeout(total=args.timeout)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        try:  # the client's own first-use costs; any answer will do
            async with session.get(args.base_url.rstrip("/") + "/health") as resp:
                await resp.read()
        except (aiohttp.ClientError, OSError):
            pass
        gc.collect()
        gc.disable()
        conn.send("ready")
        start = conn.recv()
        cpu = time.process_time()

        async def later(res: Result, body: bytes) -> None:
            if (wait := start + res.at - now()) > 0:
                await asyncio.sleep(wait)
            await one_request(session, url, body, res)

        if args.rate == "seq":
            await asyncio.sleep(max(0.0, start - now()))
            for res, body in work:
                res.at = now() - start
                await one_request(session, url, body, res)
        else:
            await asyncio.gather(*(later(*w) for w in work))
        conn.send(([w[0] for w in work], time.process_time() - cpu))


def process(args: argparse.Namespace, jobs: list[tuple[dict, float]], conn) -> None:
    uvloop.run(drive(args, jobs, conn))


def run(args: argparse.Namespace, rows: list[dict]) -> tuple[float, list[Result], list[float]]:
    """Start time, results, CPU seconds of each process."""
    at = arrivals(len(rows), float("inf") if args.rate == "seq" else args.rate, args.seed)
    jobs = list(zip(rows, at, strict=True))
    procs = 1 if args.rate == "seq" else min(args.procs, len(rows))
    ctx, pipes, children = mp.get_context("fork"), [], []
    for k in range(procs):
        here, there = ctx.Pipe()
        child = ctx.Process(target=process, args=(args, jobs[k::procs], there), daemon=True)
        child.start()
        there.close()
        pipes.append(here)
        children.append(child)
    for pipe in pipes:
        pipe.recv()
    start = now() + 0.2
    for pipe in pipes:
        pipe.send(start)
    results, cpu = [], []
    for pipe in pipes:
        part, seconds = pipe.recv()
        results += part
        cpu.append(seconds)
    for child in children:
        child.join()
    return start, results, cpu


# ---------------------------------------------------------------- figures


def dist(values: list[float], digits: int = 2) -> dict[str, float] | None:
    """Mean and nearest-rank percentiles in milliseconds."""
    if not values:
        return None
    v = sorted(values)
    out = {"mean": statistics.fmean(v)}
    out |= {f"p{p}": v[max(0, -(-len(v) * p // 100) - 1)] for p in (50, 90, 99)}
    out["max"] = v[-1]
    return {k: round(x * 1e3, digits) for k, x in out.items()}


def peak_in_flight(results: list[Result]) -> int:
    peak = level = 0
    for _, step in sorted([(r.begun, 1) for r in results] + [(r.ended, -1) for r in results]):
        level += step
        peak = max(peak, level)
    return peak


def summary(args: argparse.Namespace, start: float, results: list[Result], cpu: list[float]) -> dict:
    good = [r for r in results if not r.error]
    errors: dict[str, int] = {}
    for r in results:
        if r.error:
            errors[r.error] = errors.get(r.error, 0) + 1
    duration = max(r.ended for r in results) - start
    tokens, prompts = sum(r.tokens for r in good), sum(r.prompt_tokens for r in good)
    streams = [e for r in good for e in r.events.values()]
    events = sum(map(len, streams))
    last = max(r.at for r in results)
    out = {
        "label": args.label,
        "workload": Path(args.workload).name,
        "rate": str(args.rate) if args.rate in ("seq", float("inf")) else args.rate,
        "requests": len(results),
        "completed": len(good),
        "failures": len(results) - len(good),
        "duration_s": round(duration, 3),
        "last_arrival_s": round(last, 3),
        "output_tokens": tokens,
        "prompt_tokens": prompts,
        "output_tok_s": round(tokens / duration, 1),
        "total_tok_s": round((tokens + prompts) / duration, 1),
        "requests_s": round(len(good) / duration, 3),
        "window_tok_s": None,
        "ttft_ms": dist([min(e[0] for e in r.events.values()) - r.begun for r in good]),
        "itl_ms": dist([b - a for e in streams for a, b in pairwise(e)], 3),
        "tpot_ms": dist([(e[-1] - e[0]) / (r.want - 1) for r in good if r.want > 1 for e in r.events.values()], 3),
        "e2e_ms": dist([r.ended - r.begun for r in good]),
        "tokens_per_event": round(tokens / events, 3) if events else None,
        "peak_in_flight": peak_in_flight(results),
        "send_lag_ms": dist([r.begun - start - r.at for r in results]),
        "client_cores": round(max(cpu) / duration, 3),
        "procs": len(cpu),
        "seed": args.seed,
        "temperature": args.temperature,
    }
    if events and last > 1 and args.rate != "seq":
        lo, hi = start + last / 4, start + last
        seen = sum(1 for e in streams for t in e if lo <= t < hi)
        out["window_tok_s"] = round(seen * tokens / events / (hi - lo), 1)
    if errors:
        out["errors"] = dict(sorted(errors.items(), key=lambda x: -x[1])[:5])
    return out


def write_detail(path: str, start: float, results: list[Result]) -> None:
    with Path(path).open("w", encoding="utf-8") as f:
        for r in sorted(results, key=lambda r: r.id):
            firsts = [e[0] for e in r.events.values()]
            f.write(
                json.dumps(
                    {
                        "id": r.id,
                        "at": round(r.at, 4),
                        "begun": round(r.begun - start, 4),
                        "tokens": r.tokens,
                        "first": round(min(firsts) - start, 4) if firsts else None,
                        "ended": round(r.ended - start, 4),
                        "error": r.error,
                    }
                )
                + "\n"
            )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--base-url", default="http://127.0.0.1:8000")
    p.add_argument("--path", default="/v1/completions")
    p.add_argument("--model", required=True)
    p.add_argument("--workload", required=True)
    p.add_argument("--vocab", type=int, required=True, help="prompt ids are below this")
    p.add_argument("--rate", default="inf", help="requests a second, or inf, or seq")
    p.add_argument("--limit", type=int, default=0, help="first rows only; 0: all")
    p.add_argument("--seed", type=int, default=0, help="of the arrival times")
    p.add_argument("--procs", type=int, default=4)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--extra-body", type=json.loads, default={}, help="JSON merged into each request")
    p.add_argument("--timeout", type=float, default=600.0, help="seconds, for each request")
    p.add_argument("--label", default="")
    p.add_argument("--out", help="append the JSON line to this file as well")
    p.add_argument("--detail", help="write one JSON line for each request")
    args = p.parse_args(argv)
    if args.rate != "seq":
        args.rate = float(args.rate)
    return args


def main() -> int:
    args = parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = load_rows(args.workload, args.limit)
    start, results, cpu = run(args, rows)
    line = json.dumps(summary(args, start, results, cpu))
    print(line, flush=True)
    if args.out:
        with Path(args.out).open("a", encoding="utf-8") as f:
            f.write(line + "\n")
    if args.detail:
        write_detail(args.detail, start, results)
    return 0 if all(not r.error for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
