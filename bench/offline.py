"""The engine without HTTP: throughput of a workload, latency of one stream, and the time line of steady decode.

    pagewalk bench throughput --workload chat-1000 --shape 8b       all requests of a workload at once
    pagewalk bench latency --shape smol                             one request at a time
    pagewalk bench steady --shape smol --sequences 1,64,256,1024    host and device time of a decode step
    pagewalk bench gaps --shape 8b --max-itl-ms 20                  long prompts that come while others decode

Each prints one JSON line last. `--shape` is a network with random weights; `--model` a real one.
"""

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from bench import workload
from model.step_plan import SamplingParameters
from service.assembly import Assembly, assemble
from service.engine import StepReport
from service.engine_client import Ended, EngineDied, Event, Sibling, Submit
from service.request import Sequence
from service.settings import Settings

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu"}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": LLAMA
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "smol": LLAMA
    | {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "qwen06b": LLAMA
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "tiny": LLAMA
    | {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 256,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}
"""config.json of the shapes that floors and peers' numbers exist for; tiny: to see the engine work anywhere."""


def write_config(folder: Path, shape: str) -> None:
    """The config.json of a shape: all that a network of random weights needs."""
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | {"torch_dtype": "bfloat16"}))


class Receiver:
    """The front end of a benchmark: keeps counts and times, and says when all Sequences have ended."""

    def __init__(self) -> None:
        self.tokens = 0
        self.first_s: dict[int, float] = {}
        self.last_s: dict[int, float] = {}
        self.open = self.sequences = 0
        self.all_ended = asyncio.Event()
        self.failure: str | None = None

    def deliver(self, event: Event) -> None:
        if isinstance(event, EngineDied):
            self.failure = event.message
            self.all_ended.set()
            return
        self.tokens += len(event.tokens)
        has_new = len(self.first_s) < self.sequences
        if has_new or event.ended:
            now = time.perf_counter()
            for number in event.sequence_ids if has_new else ():
                self.first_s.setdefault(number, now)
            for ended in event.ended:
                self.last_s[ended.sequence_id] = now
                if ended.reason == "error":
                    self.failure = ended.message
        self.open -= len(event.ended)
        if event.ended and self.open <= 0:
            self.all_ended.set()

    def reset(self, sequences: int) -> None:
        self.__init__()  # type: ignore[misc]
        self.open = self.sequences = sequences


@dataclass
class StepLog:
    """An observer that keeps every step's report."""

    reports: list[StepReport] = field(default_factory=list)

    def step_ended(self, report: StepReport) -> None:
        self.reports.append(report)

    def sequence_ended(self, sequence: Sequence, ended: Ended, now: float) -> None:
        pass

    def host_us(self) -> dict[str, dict[str, float]]:
        """Median and 99th percentile, in us, of the host's parts of a step that only decodes."""
        steady = [r for r in self.reports if r.decode_tokens and not r.prefill_tokens]
        parts = {
            name: [getattr(r, f"{name}_s") * 1e6 for r in steady] for name in ("schedule", "submit", "wait", "commit")
        }
        return {
            name: {
                "p50": round(float(np.median(us)), 1),
                "mean": round(float(np.mean(us)), 1),
                "p99": round(float(np.quantile(us, 0.99)), 1),
            }
            for name, us in parts.items()
            if us
        }

    def gaps_ms(self) -> dict[str, float]:
        """Between two tokens of a Sequence: median, 99th percentile, longest."""
        gaps = np.concatenate([report.gaps_s for report in self.reports]) * 1e3
        gaps = gaps[~np.isnan(gaps)]
        return {
            "p50": round(float(np.median(gaps)), 3),
            "p99": round(float(np.quantile(gaps, 0.99)), 3),
            "max": round(float(gaps.max()), 3),
        }


class Runner:
    """One assembled engine that benchmarks are run on, one after the other."""

    def __init__(self, assembly: Assembly, log: StepLog) -> None:
        self.assembly = assembly
        self.log = log
        self.receiver = Receiver()
        self.assembly.engine.connect(0, self.receiver)
        self.began_s = 0.0  # when the last run's first request was handed in
        self.saved_pct = 0.0  # of the last run: frames that sharing saved, of those needed without it, over its turns
        self._next_id = 0

    async def run(
        self,
        items: list[workload.Item],
        sampling: SamplingParameters,
        *,
        prefix_cache: bool = False,
        separate: bool = False,
        arrivals_s: list[float] | None = None,
    ) -> float:
        """All items, to their full lengths, with nothing cached before; returns seconds.

        separate: the n choices of an item are requests of their own, which share nothing. arrivals_s: when each item
        comes, ascending; None: all at once.
        """
        memory = self.assembly.engine.scheduler.memory
        memory.drop_caches()
        self.receiver.reset(sum(item.n for item in items))
        self.log.reports.clear()
        before = memory.counters()
        self.began_s = started = time.perf_counter()
        for item, arrival_s in zip(items, arrivals_s or [0.0] * len(items), strict=True):
            if (early_s := arrival_s - (time.perf_counter() - started)) > 0:
                await asyncio.sleep(early_s)
            first = self._next_id + 1
            self._next_id += item.n
            ids = list(range(first, first + item.n))
            for family in [[number] for number in ids] if separate else [ids]:
                message = Submit(
                    family[0],
                    "bench",
                    item.prompt_ids,
                    item.output_len,
                    msgspec.structs.replace(sampling, seed=family[0]),
                    [],
                    prefix_cache=prefix_cache,
                    siblings=[Sibling(number, seed=number) for number in family[1:]],
                )
                self.assembly.engine.post(0, message)
        await self.receiver.all_ended.wait()
        seconds = time.perf_counter() - started
        if self.receiver.failure:
            raise RuntimeError(self.receiver.failure)
        after = memory.counters()
        saved = after.saved_frame_turns - before.saved_frame_turns
        mapped = after.mapped_frame_turns - before.mapped_frame_turns
        self.saved_pct = 100 * saved / max(1, saved + mapped)
        return seconds


@contextmanager
def model_folder(args: argparse.Namespace) -> Iterator[Path]:
    """The folder of --model, or one with nothing but the config.json of --shape."""
    if args.model:
        from model.source import resolve

        yield resolve(args.model).folder
        return
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), args.shape)
        yield Path(folder)


@asynccontextmanager
async def started(args: argparse.Namespace) -> AsyncIterator[tuple[Runner, dict[str, Any]]]:
    """A running engine, and the facts about it that go into every answer."""
    with model_folder(args) as folder:
        settings = Settings(
            device=args.device,
            dtype=args.dtype,
            load_format="auto" if args.model else "dummy",
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            swap_memory_bytes=args.swap_memory_bytes,
            shared_prefixes=args.shared_prefixes,
            max_itl_ms=args.max_itl_ms,
        )
        log = StepLog()
        began = time.perf_counter()
        assembly = assemble(settings, folder, log, thin_rows=args.thin_rows)
    runner = Runner(assembly, log)
    assembly.engine.open()
    gc.collect()
    gc.freeze()  # as the server does
    load_s = round(time.perf_counter() - began, 2)
    while assembly.executor.use_idle_time():
        pass  # as a server that has been idle for some seconds
    loop = asyncio.create_task(assembly.engine.run())
    try:
        yield (
            runner,
            {
                "model": args.model or args.shape,
                "device": assembly.device,
                "dtype": assembly.dtype,
                **({} if args.thin_rows is None else {"thin_rows": args.thin_rows}),
                "frames": assembly.executor.frames,
                "load_s": load_s,
            },
        )
    finally:
        assembly.engine.stop()
        await asyncio.wait([loop])
        assembly.executor.close()


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    async with started(args) as (runner, facts):
        return {"bench": args.bench, **facts, **await BENCHES[args.bench](runner, args)}


async def throughput(runner: Runner, args: argparse.Namespace) -> dict[str, Any]:
    """Every request of a workload at once, after 16 of them to warm up; the median of --repeat runs."""
    vocabulary = runner.assembly.config.vocabulary
    items = workload.load(args.workload, vocabulary, args.limit)
    sampling = SamplingParameters(args.temperature, args.top_k, args.top_p)
    await runner.run([workload.Item(item.prompt_ids, 16, 1) for item in items[:16]], sampling)
    how = {"prefix_cache": args.prefix_cache, "separate": args.separate}
    seconds = [await runner.run(items, sampling, **how) for _ in range(args.repeat)]
    middle = statistics.median(seconds)
    output = sum(item.output_len * item.n for item in items)
    prompts = sum(len(item.prompt_ids) for item in items)
    assert runner.receiver.tokens == output, f"{runner.receiver.tokens} tokens came, {output} were asked for"
    return {
        "workload": Path(args.workload).stem,
        "requests": len(items),
        "sampling": {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p},
        "runs_s": [round(s, 3) for s in seconds],
        "seconds": round(middle, 3),
        "output_tokens": output,
        "output_tok_s": round(output / middle, 1),
        "total_tok_s": round((output + prompts) / middle, 1),
        "steps": len(runner.log.reports),
        "gaps_ms": runner.log.gaps_ms(),
        "separate": args.separate,
        "saved_pct": round(runner.saved_pct, 1),
        "prefix_cache": args.prefix_cache,
        "shared_prefixes": args.shared_prefixes,
        "preemptions": runner.assembly.engine.scheduler.preemptions,
        "host_us": runner.log.host_us(),
    }


async def latency(runner: Runner, args: argparse.Namespace) -> dict[str, Any]:
    """One request at a time: time to the first token by prompt length, and ms a token after it."""
    vocabulary = runner.assembly.config.vocabulary
    greedy = SamplingParameters(temperature=0.0)
    first_ms: dict[str, float] = {}
    token_ms = []
    for length in [int(n) for n in args.prompt_lens.split(",")]:
        times = []
        for repeat in range(args.repeat + 1):  # the first one warms up
            item = workload.Item(workload.random_ids(repeat, length, vocabulary), args.output_len, 1)
            await runner.run([item], greedy)
            (first,), (last,) = runner.receiver.first_s.values(), runner.receiver.last_s.values()
            if repeat:
                times.append((first - runner.began_s) * 1e3)
                if length == 128:
                    token_ms.append((last - first) * 1e3 / (args.output_len - 1))
        first_ms[str(length)] = round(statistics.median(times), 3)
    return {
        "first_token_ms": first_ms,
        "ms_a_token": round(statistics.median(token_ms), 4) if token_ms else None,
        "output_len": args.output_len,
        "host_us": runner.log.host_us(),
    }


async def steady(runner: Runner, args: argparse.Namespace) -> dict[str, Any]:
    """Decode steps of a fixed batch: their period, the host's parts, and how long the device stood idle in between."""
    vocabulary = runner.assembly.config.vocabulary
    rows: dict[str, dict[str, Any]] = {}
    greedy = SamplingParameters(temperature=0.0)
    batches = {
        count: [workload.Item(workload.random_ids(i, args.context, vocabulary), 192, 1) for i in range(count)]
        for count in [int(n) for n in args.sequences.split(",")]
    }
    for sequences, items in batches.items():
        seconds = await runner.run(items, greedy)
        decodes = [r for r in runner.log.reports if r.decode_tokens == sequences and not r.prefill_tokens]
        periods = [(r.schedule_s + r.submit_s + r.wait_s + r.commit_s) * 1e6 for r in decodes]
        row = {"steps": len(decodes), "step_us": round(float(np.median(periods)), 1), "host_us": runner.log.host_us()}
        rows[str(sequences)] = row | {"seconds": round(seconds, 3)}
    if runner.assembly.device == "cuda":  # last: once a profiler has been attached, every launch costs more
        for sequences, items in batches.items():
            rows[str(sequences)] |= await device_share(runner, items, greedy)
    return {"context": args.context, "sequences": rows}


async def device_share(runner: Runner, items: list[workload.Item], sampling: SamplingParameters) -> dict[str, Any]:
    """Where a decode step's time goes on the device, in the middle of a run, from the profiler's records.

    idle_share: of the time, that no kernel ran; host_share: of the time, that passed before a step's upload began, so
    that the device waited for the host; kernels: a step; top_us: time a step in the kernels that take most.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    task = asyncio.create_task(runner.run(items, sampling))
    while not any(r.decode_tokens == len(items) for r in runner.log.reports):  # noqa: ASYNC110  (a step has no event)
        await asyncio.sleep(0)
    for _ in range(40):
        await asyncio.sleep(0)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        seen = len(runner.log.reports)
        while len(runner.log.reports) < seen + 40 and not task.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        torch.cuda.synchronize()
    await task
    spans = sorted(
        (event.time_range.start, event.time_range.end, "HtoD" in event.name)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    middle = [span for span in spans if spans[0][0] + 1000 < span[0]]
    busy, waited, reached = 0.0, 0.0, middle[0][0]
    for start, end, is_upload in middle:
        busy += max(0.0, end - max(start, reached))
        waited += max(0.0, start - reached) if is_upload else 0.0
        reached = max(reached, end)
    times: dict[str, float] = {}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.split("(")[0][:60]
            times[name] = times.get(name, 0.0) + event.time_range.end - event.time_range.start
    steps = len(runner.log.reports[seen:][:40])
    top = sorted(times.items(), key=lambda item: -item[1])[:8]
    return {
        "idle_share": round(1 - busy / (reached - middle[0][0]), 4),
        "host_share": round(waited / (reached - middle[0][0]), 4),
        "kernels": round(len(spans) / max(steps, 1)),
        "top_us": {name: round(us / max(steps, 1), 1) for name, us in top},
    }


async def gaps(runner: Runner, args: argparse.Namespace) -> dict[str, Any]:
    """Long prompts that come while others decode: what it does to the gaps between tokens, and to the prompts."""
    vocabulary = runner.assembly.config.vocabulary
    count, length = int(args.sequences.split(",")[0]), int(args.prompt_lens.split(",")[-1])
    decodes = [
        workload.Item(workload.random_ids(i, args.context, vocabulary), args.output_len, 1) for i in range(count)
    ]
    prompts = [workload.Item(workload.random_ids(1000 + i, length, vocabulary), 2, 1) for i in range(args.prompts)]
    arrivals = [0.0] * count + [args.apart * (1 + i) for i in range(args.prompts)]
    runs = []
    for _ in range(args.repeat):
        began = time.perf_counter()
        seconds = await runner.run(decodes + prompts, SamplingParameters(temperature=0.0), arrivals_s=arrivals)
        last = sorted(runner.receiver.first_s)[count:]
        waits = [runner.receiver.first_s[number] - began for number in last]
        first_ms = [(wait - at) * 1e3 for wait, at in zip(waits, arrivals[count:], strict=True)]
        chunks = [r.prefill_tokens for r in runner.log.reports if r.prefill_tokens and r.decode_tokens]
        runs.append(
            {
                "seconds": round(seconds, 3),
                "gaps_ms": runner.log.gaps_ms(),
                "first_token_ms": round(statistics.median(first_ms), 1),
                "chunk_p50": int(np.median(chunks)) if chunks else 0,
            }
        )
    return {"max_itl_ms": args.max_itl_ms, "decodes": count, "prompts": args.prompts, "prompt": length, "runs": runs}


BENCHES = {"throughput": throughput, "latency": latency, "steady": steady, "gaps": gaps}


def command_line() -> argparse.ArgumentParser:
    """The flags of `pagewalk bench`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bench", choices=BENCHES)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", choices=SHAPES, default="smol", help="random weights of this shape")
    what.add_argument("--model", help="a real model, as for pagewalk serve")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--prefix-cache", action="store_true", help="share cached pages inside a run (throughput)")
    parser.add_argument(
        "--separate", action="store_true", help="choices of one prompt as requests of their own (throughput)"
    )
    parser.add_argument("--shared-prefixes", choices=("auto", "off"), default="auto", help="as for pagewalk serve")
    parser.add_argument("--swap-memory-bytes", type=int)
    parser.add_argument("--max-itl-ms", type=float, help="as for pagewalk serve")
    parser.add_argument("--workload", default="chat-1000", help=", ".join(workload.names()) + ", or a .jsonl file")
    parser.add_argument("--limit", type=int, help="only the first rows of the workload")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--prompt-lens", default="128,512,2048", help="of the latency bench, in tokens")
    parser.add_argument("--output-len", type=int, default=128, help="of the latency bench, in tokens")
    parser.add_argument("--sequences", default="1,64,256,1024", help="batch sizes of the steady bench; gaps: the first")
    parser.add_argument(
        "--prompts", type=int, default=4, help="of the gaps bench: long ones, of the last --prompt-lens"
    )
    parser.add_argument("--apart", type=float, default=0.3, help="of the gaps bench: seconds between two long prompts")
    parser.add_argument("--thin-rows", type=int, help="GPU steps of so many tokens take the thin kernels; 0: none does")
    parser.add_argument("--context", type=int, default=128, help="prompt length of the steady bench, in tokens")
    return parser


def main() -> None:
    args = command_line().parse_args()
    print(json.dumps(uvloop.run(measure(args))))


if __name__ == "__main__":
    main()
