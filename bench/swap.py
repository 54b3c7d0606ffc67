"""Swap on a GPU: how fast pages move, what that costs the steps beside it, and a workload in a pool that is too small.

    python -m bench.swap [--shape 8b] [--share 0.25] [--workload chat-1000]

copies     frames out and back in, alone: GB/s
beside     decode steps of 64 Sequences while frames go out and in without a pause, against the same steps alone
pressure   the workload with a pool of `share` of what all its requests need at once, against the same number of running
           Sequences in a pool that holds them all

Prints one JSON line last.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import uvloop

from bench import offline, workload
from mm import PAGE_SIZE, SwapOrders
from model.step_plan import SamplingParameters

GREEDY = SamplingParameters(temperature=0.0)
COPIED_FRAMES = 512


async def wait_for_slots(runner: offline.Runner) -> None:
    executor = runner.assembly.executor
    executor.want_slots(executor.slots)
    while executor.ready_slots < executor.slots:  # noqa: ASYNC110  (memory comes in a thread)
        await asyncio.sleep(0.05)


def move(runner: offline.Runner, orders: SwapOrders) -> float:
    """Seconds of one order, from its start to its end, with nothing beside it."""
    executor = runner.assembly.executor
    began = time.perf_counter()
    executor.start(orders)
    while not executor.ended():
        pass
    return time.perf_counter() - began


async def copies(runner: offline.Runner) -> dict[str, Any]:
    """GB/s of 512 scattered frames each way. The engine is idle, so the pool is this function's."""
    executor = runner.assembly.executor
    generator = np.random.default_rng(0)
    frames = generator.permutation(executor.frames)[:COPIED_FRAMES].astype(np.int32)
    slots = generator.permutation(executor.slots)[:COPIED_FRAMES].astype(np.int32)
    size = COPIED_FRAMES * executor.frame_bytes / 1e9
    out = [move(runner, SwapOrders(1, out_frames=frames, out_slots=slots)) for _ in range(6)][1:]
    back = [move(runner, SwapOrders(2, in_slots=slots, in_frames=frames)) for _ in range(6)][1:]
    return {
        "frame_bytes": executor.frame_bytes,
        "out_gb_s": round(size / statistics.median(out), 2),
        "in_gb_s": round(size / statistics.median(back), 2),
    }


async def beside(runner: offline.Runner) -> dict[str, Any]:
    """Median step of 64 decoding Sequences alone, and while spare frames move all the time.

    The moved frames belong to nobody: the pool is large, and its last frames are never given out in this run.
    """
    vocabulary, executor = runner.assembly.config.vocabulary, runner.assembly.executor
    items = [workload.Item(workload.random_ids(i, 512, vocabulary), 300, 1) for i in range(64)]
    await runner.run(items, GREEDY)
    alone = steady_step_us(runner, 64)
    last = executor.frames - 1
    frames = np.arange(last - COPIED_FRAMES, last, dtype=np.int32)
    slots = np.arange(COPIED_FRAMES, dtype=np.int32)
    ended, moved = executor.ended, 0
    setattr(executor, "ended", list)  # noqa: B010  (the engine must not see these orders, mypy this trick)
    task = asyncio.create_task(runner.run(items, GREEDY))
    began = time.perf_counter()
    is_out, under_way = True, False
    while not task.done():
        if not under_way:
            orders = SwapOrders(1, frames, slots) if is_out else SwapOrders(1, in_slots=slots, in_frames=frames)
            executor.start(orders)
            is_out, under_way = not is_out, True
        await asyncio.sleep(0)
        if ended():
            under_way, moved = False, moved + COPIED_FRAMES
    seconds = time.perf_counter() - began
    while under_way and not ended():
        pass
    setattr(executor, "ended", ended)  # noqa: B010
    both = steady_step_us(runner, 64)
    return {
        "step_alone_us": alone,
        "step_beside_us": both,
        "slower": round(both / alone - 1, 4),
        "moved_gb_s": round(moved * executor.frame_bytes / 1e9 / seconds, 2),
    }


def steady_step_us(runner: offline.Runner, sequences: int) -> float:
    steps = [r for r in runner.log.reports if r.decode_tokens == sequences and not r.prefill_tokens]
    times = [(r.schedule_s + r.submit_s + r.wait_s + r.commit_s) * 1e6 for r in steps]
    return round(float(np.median(times)), 1)


async def workload_seconds(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the workload, what mm counted, and how many Sequences ran in its fuller steps."""
    async with offline.started(args) as (runner, _):
        await wait_for_slots(runner)
        items = workload.load(args.workload, runner.assembly.config.vocabulary, args.limit)
        seconds = await runner.run(items, GREEDY)
        running = [report.decode_tokens for report in runner.log.reports]
        counters = runner.assembly.engine.scheduler.memory.counters()
        return {
            "seconds": round(seconds, 3),
            "steps": len(running),
            "running": int(np.quantile(running, 0.75)),
            "pool_frames": runner.assembly.executor.frames,
            "preemptions": runner.assembly.engine.scheduler.preemptions,
            "swapped_out": counters.swap_out,
            "swapped_in": counters.swap_in,
        }


async def links(args: argparse.Namespace) -> dict[str, Any]:
    async with offline.started(args) as (runner, facts):
        await wait_for_slots(runner)
        items = workload.load(args.workload, runner.assembly.config.vocabulary, args.limit)
        demand = sum(-(-(len(item.prompt_ids) + item.output_len) // PAGE_SIZE) * item.n for item in items)
        return {**facts, "demand_frames": demand, "copies": await copies(runner), "beside": await beside(runner)}


PHASES = {"links": links, "workload": workload_seconds}


def child(phase: str, *flags: str) -> dict[str, Any]:
    """One phase in a process of its own: each wants the whole card."""
    command = [sys.executable, "-m", "bench.swap", *sys.argv[1:], *flags, "--phase", phase]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def main() -> None:
    parser = offline.command_line()
    parser.add_argument("--share", type=float, default=0.25, help="of the frames that all requests need at once")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    args = parser.parse_args(["throughput", *sys.argv[1:]])
    if args.phase:
        print(json.dumps(uvloop.run(PHASES[args.phase](args))))
        return
    answer = child("links")
    pool_bytes = int(answer["demand_frames"] * args.share) * answer["copies"]["frame_bytes"]
    tight = child("workload", "--kv-cache-memory-bytes", str(pool_bytes))
    loose = child("workload", "--max-num-seqs", str(tight["running"]))
    kept = round(loose["seconds"] / tight["seconds"], 4)
    print(json.dumps(answer | {"workload": args.workload, "tight": tight, "loose": loose, "throughput_kept": kept}))


if __name__ == "__main__":
    main()
