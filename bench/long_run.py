"""A mixed load for minutes or hours, in memory that is too small for it: what must not grow, does not.

    pagewalk bench long_run [--minutes 8] [--shape smol] [--max-num-seqs 256] [--pool 0.25]

Requests of every kind come and go: choices, beams, penalties, log-probabilities, shared beginnings, forks, deadlines,
clients that leave, text stops. The pool holds `--pool` of what those that run would like, so some are preempted, by
swap and by recomputation.

Every `--every` seconds one line of numbers goes to stderr. At the end all books must balance: the audit finds nothing,
no frame or slot is held, each answer has the length that its end says. One JSON line comes last, with the slopes of
memory and speed over the second half. Exit code 1 if anything is wrong but a slope: those are for a person to judge.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import uvloop

from bench import offline, workload
from mm import PAGE_SIZE
from model.step_plan import SamplingParameters
from service.assembly import Assembly
from service.engine_client import BeamSearch, Cancel, EngineDied, Event, Finish, Sibling, Submit
from service.errors import BadRequest, NotFound, QueueFull
from service.questions import Fork

if TYPE_CHECKING:
    from model.cuda_executor import CudaExecutor

FRONT_END = 1
PREFIXES = 8
MEAN_PROMPT, MEAN_OUTPUT = 250, 150
"""About what `Clients` ask for, in tokens, where the context allows it."""

QUEUE = 0.5
"""Sequences that wait, as a share of those that may run."""

PATIENCE_S = 600.0
"""For what still runs at the end."""

SLOPES = ("step_us", "device_bytes", "torch_bytes", "page_locked_bytes", "resident_bytes", "open_files", "graphs")


@dataclass(slots=True)
class Open:
    """A Sequence that has not ended."""

    max_tokens: int
    can_fork: bool = False
    tokens: int = 0
    was_left: bool = False


class Clients:
    """Who asks, reads, and leaves. The front end of this benchmark."""

    def __init__(self, assembly: Assembly, seed: int) -> None:
        self._engine = assembly.engine
        self._vocabulary = assembly.config.vocabulary
        self._longest = min(assembly.client.limits.max_request_tokens, assembly.client.limits.max_model_len, 2048)
        self._widest = assembly.client.limits.max_running
        self._draw = random.Random(seed)
        length = min(512, self._longest // 4)
        self._prefixes = [workload.random_ids(i, length, self._vocabulary) for i in range(PREFIXES)]
        self._next_id = 0
        self.open: dict[int, Open] = {}
        self.tokens = 0
        self.asked: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.problems: list[str] = []

    # --- what the engine calls

    def deliver(self, event: Event) -> None:
        if isinstance(event, EngineDied):
            self.problems.append(f"the engine died: {event.message}")
            return
        self.tokens += len(event.tokens)
        for number in event.sequence_ids:
            if (sequence := self.open.get(number)) is None:
                self.problems.append(f"sequence {number} got a token after its end")
            else:
                sequence.tokens += 1
        for ended in event.ended:
            self.ended[ended.reason] += 1
            sequence = self.open.pop(ended.sequence_id)
            if ended.reason == "error":
                self.problems.append(f"sequence {ended.sequence_id}: {ended.message}")
            elif ended.reason == "length" and sequence.tokens != sequence.max_tokens:
                has = f"{sequence.tokens} of {sequence.max_tokens} tokens"
                self.problems.append(f"sequence {ended.sequence_id} ended by length with {has}")

    # --- what clients do

    def ask(self) -> None:
        """One request of a kind drawn at random."""
        draw = self._draw
        kinds = {
            "plain": 30, "choices": 15, "penalties": 15, "logprobs": 10, "prefix": 25, "beams": 4, "scores": 3,
            "deadline": 2,
        }  # fmt: skip
        kind = draw.choices(list(kinds), list(kinds.values()))[0]
        self.asked[kind] += 1
        output = min(1 + int(draw.expovariate(1 / MEAN_OUTPUT)), self._longest // 2)
        prompt = min(1 + int(draw.expovariate(1 / MEAN_PROMPT)), self._longest - output - 1)
        sampling: dict[str, Any] = {"temperature": draw.choice([0.0, 0.7, 1.0]), "top_p": draw.choice([1.0, 0.9])}
        more: dict[str, Any] = {"prefix_cache": draw.random() < 0.8}
        count = 1
        match kind:
            case "choices":
                count = min(draw.randint(2, 8), self._widest)
            case "penalties":
                sampling |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
                some = workload.random_ids(self._next_id, 12, self._vocabulary)
                sampling |= {"logit_bias": dict.fromkeys(some[:8], -5.0), "bad_words": [some[8:9], some[10:12]]}
            case "logprobs":
                sampling["logprobs"] = draw.randint(0, 20)
            case "beams":
                count = min(draw.randint(2, 4), self._widest)
                output, more["beam_search"] = min(output, 48), BeamSearch(count)
                sampling = {"temperature": 0.0}
            case "scores":
                prompt, more["prompt_logprobs"] = min(prompt, 300), draw.randint(0, 5)
            case "deadline":
                more["timeout_s"] = draw.uniform(0.05, 2.0)
        ids = workload.random_ids(draw.randrange(1 << 30), prompt, self._vocabulary)
        if kind == "prefix":
            ids = (draw.choice(self._prefixes) + ids)[: self._longest - output - 1]
        numbers = list(range(self._next_id + 1, self._next_id + 1 + count))
        self._next_id += count
        self.open.update({number: Open(output, can_fork=kind != "beams") for number in numbers})
        self._engine.post(
            FRONT_END,
            Submit(
                numbers[0],
                f"long-{numbers[0]}",
                ids,
                output,
                SamplingParameters(**{**sampling, "seed": numbers[0]}),
                [],
                siblings=[Sibling(number, seed=number) for number in numbers[1:]],
                **more,
            ),
        )

    async def fork(self) -> None:
        """A second request from where somebody's stands."""
        draw = self._draw
        parent = draw.choice(list(self.open))
        if not self.open[parent].can_fork or not self.open[parent].tokens:
            return
        self._next_id += 1
        number, output = self._next_id, draw.randint(1, 60)
        self.open[number] = Open(output, can_fork=True)
        sampling = SamplingParameters(temperature=draw.choice([0.0, 1.0]), seed=number)
        question = Fork("", (FRONT_END, parent), number, f"long-{number}", sampling, [], max_tokens=output)
        try:
            await self._engine.fork(FRONT_END, question)
        except (BadRequest, NotFound, QueueFull):  # it is too long by now, or has just ended
            del self.open[number]
        else:
            self.asked["fork"] += 1

    def leave(self) -> None:
        """Somebody goes away: at any moment of its life, or because its text has ended."""
        number = self._draw.choice(list(self.open))
        sequence = self.open[number]
        if sequence.was_left:
            return
        sequence.was_left = True
        if sequence.tokens > 1 and self._draw.random() < 0.3:
            self._engine.post(FRONT_END, Finish(number, self._draw.randint(1, sequence.tokens)))
        else:
            self._engine.post(FRONT_END, Cancel(number))


@dataclass(frozen=True, slots=True)
class Sample:
    """What is looked at every few seconds."""

    seconds: float
    steps: int
    tokens: int
    step_us: float  # mean since the sample before
    device_bytes: int  # of the whole device, as its driver says
    torch_bytes: int  # of these, in tensors
    page_locked_bytes: int
    resident_bytes: int  # of this process (RSS)
    open_files: int
    graphs: int
    free_frames: int
    cached_frames: int
    free_slots: int


class Watch:
    """Takes samples, and tells them."""

    def __init__(self, assembly: Assembly, clients: Clients) -> None:
        self._assembly, self._clients = assembly, clients
        self._began = time.perf_counter()
        self.samples: list[Sample] = []

    def look(self) -> Sample:
        executor, engine = self._assembly.executor, self._assembly.engine
        information = engine.scheduler.memory.information()
        now, steps = time.perf_counter() - self._began, engine.snapshot().step
        last = self.samples[-1] if self.samples else None
        device = torch_bytes = page_locked = graphs = 0
        if self._assembly.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            device, torch_bytes = total - free, torch.cuda.memory_allocated()
            page_locked = torch.cuda.host_memory_stats()["allocated_bytes.current"]
            graphs = cast("CudaExecutor", executor).captured_graphs
        since = (now - last.seconds, steps - last.steps) if last else (now, steps)
        sample = Sample(
            seconds=round(now, 2),
            steps=steps,
            tokens=self._clients.tokens,
            step_us=round(since[0] / max(since[1], 1) * 1e6, 1),
            device_bytes=device,
            torch_bytes=torch_bytes,
            page_locked_bytes=page_locked,
            resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            open_files=sum(1 for _ in Path("/proc/self/fd").iterdir()),
            graphs=graphs,
            free_frames=information.free_frames,
            cached_frames=information.cached_frames,
            free_slots=information.free_slots,
        )
        self.samples.append(sample)
        return sample

    def tell(self, sample: Sample) -> None:
        last = self.samples[-2] if len(self.samples) > 1 else None
        seconds = sample.seconds - (last.seconds if last else 0)
        steps, tokens = sample.steps - (last.steps if last else 0), sample.tokens - (last.tokens if last else 0)
        print(
            f"{sample.seconds:7.0f} s  {steps / seconds:7.0f} steps/s  {tokens / seconds:8.0f} tokens/s  "
            f"device {sample.device_bytes / 1e6:,.1f} MB (tensors {sample.torch_bytes / 1e6:,.1f})  "
            f"page-locked {sample.page_locked_bytes / 1e6:,.1f} MB  RSS {sample.resident_bytes / 1e6:,.1f} MB  "
            f"files {sample.open_files}  graphs {sample.graphs}  "
            f"frames free {sample.free_frames} cached {sample.cached_frames}  slots free {sample.free_slots}",
            file=sys.stderr,
            flush=True,
        )

    def slopes(self) -> dict[str, float]:
        """By least squares over the second half: what each number gains in 1,000 steps."""
        loaded = self.samples[:-1]  # the last one is of an engine that is idle again
        half = loaded[len(loaded) // 2 :]
        steps = np.array([sample.steps for sample in half], float) / 1e3
        if len(half) < 2 or np.ptp(steps) == 0:
            return {}
        return {name: round(float(np.polyfit(steps, [getattr(s, name) for s in half], 1)[0]), 3) for name in SLOPES}


async def load(assembly: Assembly, clients: Clients, watch: Watch, args: argparse.Namespace) -> None:
    """Keep the engine busy for the time."""
    draw = random.Random(args.seed + 1)
    until = time.perf_counter() + args.minutes * 60
    next_look = time.perf_counter() + args.every
    most = int(assembly.client.limits.max_running * (1 + QUEUE))
    while time.perf_counter() < until and not clients.problems:
        while len(clients.open) < most:
            clients.ask()
            if draw.random() < 0.15:
                clients.leave()
            if draw.random() < 0.1:
                await clients.fork()
        await asyncio.sleep(0.002)
        if time.perf_counter() >= next_look:
            next_look += args.every
            watch.tell(watch.look())


async def settle(assembly: Assembly, clients: Clients) -> list[str]:
    """Let all end; returns what is still held then, and what the audit finds."""
    engine, memory = assembly.engine, assembly.engine.scheduler.memory
    patience = time.perf_counter() + PATIENCE_S
    while (clients.open or engine.scheduler.has_work) and not clients.problems and time.perf_counter() < patience:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)  # copies to swap, of pages that nobody maps
    found = memory.audit()
    memory.drop_caches()
    found += memory.audit()
    information = memory.information()
    held = {
        "sequences": len(clients.open),
        "rows": information.rows,
        "frames": information.total_frames - information.free_frames,
        "slots": information.total_slots - information.free_slots,
        "committed frames": information.committed_frames,
    }
    return found + [f"{count} {what} are still held" for what, count in held.items() if count]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    async with offline.started(args) as (runner, facts):
        assembly = runner.assembly
        clients = Clients(assembly, args.seed)
        assembly.engine.connect(FRONT_END, clients)
        watch = Watch(assembly, clients)
        watching = asyncio.create_task(forget_reports(runner))
        await load(assembly, clients, watch, args)
        problems = clients.problems + await settle(assembly, clients)
        watching.cancel()
        watch.tell(watch.look())
        engine, last = assembly.engine, watch.samples[-1]
        return {
            **facts,
            "minutes": args.minutes,
            "seed": args.seed,
            "steps": last.steps,
            "tokens": last.tokens,
            "tok_s": round(last.tokens / last.seconds, 1),
            "asked": dict(clients.asked),
            "ended": dict(clients.ended),
            "preemptions": engine.scheduler.preemptions,
            "counters": {name: count for name, count in asdict(engine.scheduler.memory.counters()).items() if count},
            "slopes_a_1000_steps": watch.slopes(),
            "samples": len(watch.samples),
            "last": asdict(last),
            "problems": problems,
        }


async def forget_reports(runner: offline.Runner) -> None:
    """The log of steps is for short benchmarks: here it would be what grows."""
    while True:
        runner.log.reports.clear()
        await asyncio.sleep(1)


def command_line() -> argparse.ArgumentParser:
    parser = offline.command_line()
    parser.description, parser.formatter_class = __doc__, argparse.RawTextHelpFormatter
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two lines of numbers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", type=float, default=0.25, help="frames, as a share of what those that run would like")
    return parser


def settings_of(arguments: list[str]) -> argparse.Namespace:
    """The flags, with a pool and a swap area that are too small unless they are given."""
    args = command_line().parse_args(["throughput", *arguments])
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    args.max_num_seqs = args.max_num_seqs or (256 if on_gpu else 16)
    if args.kv_cache_memory_bytes is None:
        with offline.model_folder(args) as folder:
            frame = frame_bytes_of(folder, args.dtype, on_gpu=on_gpu)
        frames = int(args.pool * args.max_num_seqs * -(-(MEAN_PROMPT + MEAN_OUTPUT) // PAGE_SIZE))
        args.kv_cache_memory_bytes = max(frames, 2048 // PAGE_SIZE + 16) * frame
    if args.swap_memory_bytes is None:
        args.swap_memory_bytes = args.kv_cache_memory_bytes // 2
    return args


def frame_bytes_of(folder: Path, dtype: str, *, on_gpu: bool) -> int:
    """As the executor will count it."""
    from model.config import read_config
    from model.cpu_executor import choose_dtype
    from model.kv_pool import frame_bytes
    from service.assembly import device_dtype

    config = read_config(folder)
    return frame_bytes(config, device_dtype(config, dtype) if on_gpu else choose_dtype(config, dtype), PAGE_SIZE)


def main() -> None:
    answer = uvloop.run(measure(settings_of(sys.argv[1:])))
    print(json.dumps(answer))
    if answer["problems"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
