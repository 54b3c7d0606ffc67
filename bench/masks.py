"""What structured output costs: the gap between two tokens with and without masks, and the masks' own work.

    python -m bench.masks FOLDER [--shape smol] [--rows 1,64,256]      FOLDER: tokenizer.json of a model

A network of random weights in the shape's size writes JSON that cannot end; its tokens are as good as random, which is
hard on a grammar. For each number of rows: none of them constrained, one, all by one schema, and each by its own.
Prints one JSON line last.
"""

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import uvloop

from bench import workload
from bench.offline import SHAPES, Receiver, StepLog, write_config
from model.step_plan import SamplingParameters
from model.token_masks import mask_words
from service.assembly import Assembly, assemble
from service.constraint import Constraint
from service.engine_client import Submit
from service.grammars import Grammars, MaskWorker
from service.settings import Settings
from service.tokenization import Tokenizer

TOKENS, PROMPT = 96, 32
SAMPLING = SamplingParameters(temperature=0.8)


def endless(number: int) -> Constraint:
    """A list of people without end; every number is another schema."""
    person = {
        "type": "object",
        "properties": {
            f"name{number}": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "mail": {"type": "string", "pattern": "^[a-z]{1,9}@[a-z]{2,9}[.]org$"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        },
        "required": [f"name{number}", "age"],
        "additionalProperties": False,
    }
    return Constraint("json_schema", json.dumps({"type": "array", "minItems": 100_000, "items": person}))


class House:
    """One engine, with grammars."""

    def __init__(self, assembly: Assembly, grammars: Grammars, log: StepLog) -> None:
        self.assembly, self.grammars, self.log = assembly, grammars, log
        self.receiver = Receiver()
        self.next_id = 0
        assembly.engine.connect(0, self.receiver)
        assembly.engine.held.grammars = grammars

    async def gap_ms(self, constraints: list[Constraint | None]) -> dict[str, float]:
        """Between two tokens of requests that run at once, in steps that only decode; and what the slowest took."""
        for constraint in constraints:
            if constraint is not None:
                await self.grammars.compile(constraint)
        self.receiver.reset(len(constraints))
        self.log.reports.clear()
        for constraint in constraints:
            self.next_id += 1
            prompt = workload.random_ids(self.next_id, PROMPT, 1000)
            sampling = msgspec.structs.replace(SAMPLING, seed=self.next_id)
            message = Submit(self.next_id, "bench", prompt, TOKENS, sampling, [], constraint=constraint)
            self.assembly.engine.post(0, message)
        await self.receiver.all_ended.wait()
        if self.receiver.failure:
            raise RuntimeError(self.receiver.failure)
        decodes = [r for r in self.log.reports if r.decode_tokens == len(constraints) and not r.prefill_tokens]
        gaps = np.concatenate([report.gaps_s for report in decodes]) * 1e3
        found = {name: round(float(np.quantile(gaps, q)), 3) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
        slowest = max(decodes, key=lambda report: report.wait_s + report.commit_s + report.schedule_s + report.submit_s)
        parts = {name: getattr(slowest, f"{name}_s") * 1e3 for name in ("schedule", "submit", "wait", "commit")}
        return found | {f"slowest_{name}": round(ms, 3) for name, ms in parts.items()}


async def mask_ms(grammars: Grammars, rows: int, vocabulary: int) -> dict[str, float]:
    """Advance and fill for `rows` Sequences of one schema, without an engine: medians, by thread hop and pool."""
    grammar = await grammars.compile(endless(0))
    matchers = [grammar.start([]) for _ in range(rows)]
    masks = np.zeros((rows, mask_words(vocabulary)), np.int32)
    worker, random, seconds = MaskWorker(), np.random.default_rng(0), []
    await worker.turn([], matchers, masks)
    for _ in range(TOKENS):
        tokens = [int(random.choice(np.flatnonzero(_bits(mask)))) for mask in masks]
        began = time.perf_counter()
        await worker.turn(list(zip(matchers, tokens, strict=True)), matchers, masks)
        seconds.append(time.perf_counter() - began)
    worker.close()
    return {"p50": round(statistics.median(seconds) * 1e3, 3), "max": round(max(seconds) * 1e3, 3)}


def _bits(mask: Any) -> Any:
    return np.unpackbits(mask.view(np.uint8), bitorder="little")


def assembled(args: argparse.Namespace, log: StepLog) -> Assembly:
    settings = Settings(device=args.device, load_format="dummy", max_model_len=512, max_num_seqs=args.max_num_seqs)
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), args.shape)
        return assemble(settings, Path(folder), log)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    tokenizer, log = Tokenizer.load(Path(args.folder)), StepLog()
    assembly, vocabulary = assembled(args, log), SHAPES[args.shape]["vocab_size"]
    grammars = Grammars(tokenizer, vocabulary, tokenizer.end_ids)
    began = time.perf_counter()
    await grammars.compile(endless(0))
    found: dict[str, Any] = {"first_compile_s": round(time.perf_counter() - began, 3)}
    began = time.perf_counter()
    await grammars.compile(endless(10_000))
    found["compile_ms"] = round((time.perf_counter() - began) * 1e3, 2)
    engine = assembly.engine
    engine.open()
    gc.collect()
    gc.freeze()  # as the server does
    house = House(assembly, grammars, log)
    while assembly.executor.use_idle_time():
        pass  # as a server that has been idle for some seconds
    loop = asyncio.create_task(engine.run())
    table = []
    for rows in [int(n) for n in args.rows.split(",")]:
        await house.gap_ms([None] * rows)
        line: dict[str, Any] = {"rows": rows, "masks_alone": await mask_ms(grammars, rows, vocabulary)}
        line["none"] = await house.gap_ms([None] * rows)
        line["one"] = await house.gap_ms([endless(0), *[None] * (rows - 1)])
        line["all"] = await house.gap_ms([endless(0)] * rows)
        line["each"] = await house.gap_ms([endless(number) for number in range(rows)])
        table.append(line)
        print(json.dumps(line), flush=True)
    engine.stop()
    await asyncio.wait([loop])
    assembly.executor.close()
    device = torch.cuda.get_device_name() if assembly.device == "cuda" else "cpu"
    return {"bench": "masks", "shape": args.shape, "device": device, **found, "gaps_ms": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smol")
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    print(json.dumps(uvloop.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
