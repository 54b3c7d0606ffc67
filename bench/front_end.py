"""What a front end costs: CPU of its process for each event and each token, with an engine that computes nothing.

    pagewalk bench front-end [--streams 256] [--tokens 256] [--step-ms 20] [--front-ends 1] [--model smollm2] [--chat]

The front ends are those of the server, in processes of their own; the engine's process is this one, with random tokens
in place of a model; the clients are one more process that only counts. Three runs:

paced    one token a stream and step, steps far enough apart that each token is an event of its own
burst    all steps at once: the front ends lag, and tokens that wait go out together
alone    one request after the other, each answered as soon as it reaches the engine: what HTTP, the front end and the
         links add to a first token

Reported: CPU time of the front ends' processes (user and system, with the sockets) / events, / tokens; tokens a second
of it. What begins and ends a stream is counted in, but for the events of the paced run.
Of `alone` the time from before the connection to the first event. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import random
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from model.config import read_config
from model.source import resolve
from model.step_plan import SamplingParameters
from service.engine_client import Cancel, Ended, EngineState, Finish, Limits, Message, QueueState, Submit, TokenBatch
from service.engine_link import Hello, Serve, addresses
from service.front_end import ApiSettings
from service.front_ends import Desk, FrontEnds
from service.http_counts import HttpCounts
from service.http_server import addresses_of, reserve
from service.questions import Answers
from service.served_model import ModelFacts, TokenizerFiles

WARM_UP_TOKENS = 20


class RandomEngine:
    """Each Sequence gets one random token a step, until its max_tokens (front_ends.EngineSide)."""

    state: EngineState = "ready"
    is_alive = True
    queue = QueueState()

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # front end, sequence -> tokens so far, tokens to make
        self.answers_at_once = False
        self._desks: dict[int, Desk] = {}
        self._random = random.Random(1)

    def connect(self, front_end: int, receiver: Desk) -> None:
        self._desks[front_end] = receiver

    def disconnect(self, front_end: int) -> None:
        self._desks.pop(front_end, None)

    def post(self, front_end: int, message: Message) -> None:
        match message:
            case Submit():
                self.running[front_end, message.sequence_id] = 0, message.max_tokens
                if self.answers_at_once:
                    self.step(0)
            case Cancel() | Finish():
                self.running.pop((front_end, message.sequence_id), None)

    def step(self, number: int) -> None:
        """Ids are from the lower half of the vocabulary: common words, as in real texts, and no control tokens."""
        batches: dict[int, TokenBatch] = {}
        half = self.limits.vocabulary // 2
        for (front_end, sequence_id), (made, wanted) in list(self.running.items()):
            batch = batches.setdefault(front_end, TokenBatch(number, [], [], []))
            batch.sequence_ids.append(sequence_id)
            batch.tokens.append(self._random.randrange(300, half) if half > 300 else self._random.randrange(half))
            self.running[front_end, sequence_id] = made + 1, wanted
            if made + 1 == wanted:
                batch.ended.append(Ended(sequence_id, "length", output_tokens=wanted))
                del self.running[front_end, sequence_id]
        for front_end, batch in batches.items():
            self._desks[front_end].deliver(batch)


# --- Clients ---------------------------------------------------------------------------------------------------------


class Counting(asyncio.Protocol):
    """Sends one request, and counts the events of its answer."""

    def __init__(self, request: bytes, done: "asyncio.Future[int]") -> None:
        self._request, self._done = request, done
        self._events = 0
        self.first_s = 0.0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._events += data.count(b"data: ")
        if self._events and not self.first_s:
            self.first_s = time.perf_counter()
        self._tail = (self._tail + data)[-40:]

    def connection_lost(self, exc: Exception | None) -> None:
        if b"[DONE]" in self._tail:
            self._done.set_result(self._events - 1)
        else:
            self._done.set_exception(RuntimeError(f"a stream broke: {self._tail!r}"))


def _request(path: str, tokens: int) -> bytes:
    what = {"prompt": [300]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    body = json.dumps({**what, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return head + body


async def _clients(port: int, streams: int, tokens: int, path: str) -> int:
    """Events of all streams."""
    loop, request = asyncio.get_running_loop(), _request(path, tokens)
    ends: list[asyncio.Future[int]] = []
    for _ in range(streams):
        ends.append(loop.create_future())
        await loop.create_connection(lambda: Counting(request, ends[-1]), "127.0.0.1", port)
    return sum(await asyncio.gather(*ends))


async def _one_by_one(port: int, requests: int, path: str) -> list[float]:
    """Milliseconds to each request's first event."""
    loop, request, found = asyncio.get_running_loop(), _request(path, 1), []
    for _ in range(requests):
        done: asyncio.Future[int] = loop.create_future()
        began = time.perf_counter()
        _, protocol = await loop.create_connection(lambda done=done: Counting(request, done), "127.0.0.1", port)  # type: ignore[misc]
        await done
        found.append((protocol.first_s - began) * 1e3)
    return found


def _client_process(port: int, path: str, pipe: Connection) -> None:
    """Runs what it is told: (streams, tokens) -> events; (requests,), one after the other -> milliseconds."""
    while (order := pipe.recv()) is not None:
        match order:
            case streams, tokens:
                pipe.send(uvloop.run(_clients(port, streams, tokens, path)))
            case (requests,):
                pipe.send(uvloop.run(_one_by_one(port, requests, path)))


# --- The engine's process --------------------------------------------------------------------------------------------


async def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The runs of many streams, and the one of single requests."""
    files = resolve(options.model)
    vocabulary = read_config(files.folder).vocabulary
    limits = Limits(1 << 20, 1 << 30, max_queue_requests=1 << 20, vocabulary=vocabulary, max_running=1 << 20)
    engine, held = RandomEngine(limits), [reserve(await addresses_of("127.0.0.1", 0))[0] for _ in range(2)]

    def hello(number: int) -> Hello:
        port, admin = (addresses([(each.family, each.getsockname())]) for each in held)
        return Hello(number, ApiSettings(version="bench"), {}, port, admin, "warning", "console", 60.0)

    front_ends = FrontEnds(hello, options.front_ends, Answers(), HttpCounts())
    facts = ModelFacts((files.name,), files.root, 1, (2,), SamplingParameters(), "none", 0)
    pipe, theirs = mp.Pipe()
    path = "/v1/chat/completions" if options.chat else "/v1/completions"
    client = mp.get_context("spawn").Process(
        target=_client_process, args=(held[0].getsockname()[1], path, theirs), daemon=True
    )
    client.start()
    try:
        await front_ends.open()
        await front_ends.serve(engine, Serve(facts, TokenizerFiles.read(files.folder, None, vocabulary), limits))
        await _run(engine, front_ends, pipe, "warm-up", options.streams, WARM_UP_TOKENS, 0.0)
        results = []
        for name, step_s in (("paced", options.step_ms / 1000), ("burst", 0.0)):
            results.append(await _run(engine, front_ends, pipe, name, options.streams, options.tokens, step_s))
        return results, await _alone(engine, pipe, options.requests)
    finally:
        pipe.send(None)
        await front_ends.close()
        await asyncio.to_thread(client.join)
        for bound in held:
            bound.close()
        pipe.close()
        theirs.close()


async def _alone(engine: RandomEngine, pipe: Connection, requests: int) -> dict[str, float]:
    engine.answers_at_once = True
    pipe.send((requests,))
    found = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    return {name: round(float(np.quantile(found, q)), 3) for name, q in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))}


async def _run(
    engine: RandomEngine, front_ends: FrontEnds, pipe: Connection, name: str, streams: int, tokens: int, step_s: float
) -> dict[str, Any]:
    """Let all streams begin, then make their tokens."""
    loop = asyncio.get_running_loop()
    cpu_s = await _cpu_s(front_ends)
    pipe.send((streams, tokens))
    while len(engine.running) < streams:  # noqa: ASYNC110 - requests come over sockets
        await asyncio.sleep(0.01)
    begin_s, begun = await _cpu_s(front_ends), time.perf_counter()
    first_s = last_s = begin_s
    first_system_s = last_system_s = _system_s()
    engine_began = time.process_time()
    for number in range(tokens):
        if number == 1 and step_s:  # the first step opens the streams: status lines, and what is made once
            first_s, first_system_s = await _cpu_s(front_ends), _system_s()
        if number == tokens - 1 and step_s:
            last_s, last_system_s = await _cpu_s(front_ends), _system_s()
        engine.step(number)
        if step_s:
            await asyncio.sleep(max(0.0, begun + (number + 1) * step_s - time.perf_counter()))
        elif number % 16 == 0:
            await asyncio.sleep(0)  # the links are written in turns of the loop
    engine_s = time.process_time() - engine_began
    events = await loop.run_in_executor(None, pipe.recv)
    took_s = time.perf_counter() - begun
    whole_s = await _cpu_s(front_ends) - begin_s
    made = streams * tokens
    in_events_s, counted = (last_s - first_s, streams * (tokens - 2)) if step_s else (whole_s, events)
    return {
        "run": name,
        "streams": streams,
        "tokens": made,
        "tokens_per_event": round(made / events, 2),
        "cpu_us_per_event": round(in_events_s / counted * 1e6, 2),
        "of_which_system": round((last_system_s - first_system_s) / counted * 1e6, 2) if step_s else None,
        "cpu_us_per_token": round(whole_s / made * 1e6, 2),
        "tokens_per_cpu_s": round(made / whole_s),
        "cpu_us_per_request": round((begin_s - cpu_s) / streams * 1e6, 1),
        "engine_cpu_us_per_step": round(engine_s / tokens * 1e6, 1),
        "took_s": round(took_s, 2),
    }


async def _cpu_s(front_ends: FrontEnds) -> float:
    await front_ends.fresh_reports()
    return sum(report.cpu_s for report in front_ends.reports())


def _system_s() -> float:
    """What the system took of it, in hundredths of a second: front ends are children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = [Path("/proc", child) for child in children]
    front_ends = [each for each in found if b"service.front_end_process" in (each / "cmdline").read_bytes()]
    ticks = [(each / "stat").read_text().rsplit(")", 1)[1].split()[12] for each in front_ends]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=20.0, help="from one token of a stream to the next, paced")
    parser.add_argument("--requests", type=int, default=200, help="one after the other")
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer is used")
    parser.add_argument("--chat", action="store_true", help="the events of chats in place of completions")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results, alone_ms = uvloop.run(measure(options))
    columns = [name for name in results[0] if name != "run"]
    print(f"{'':8}", *(f"{name:>22}" for name in columns), file=sys.stderr)
    for result in results:
        print(f"{result['run']:8}", *(f"{result[name]!s:>22}" for name in columns), file=sys.stderr)
    print(f"{'alone':8} first event after {alone_ms} ms", file=sys.stderr)
    facts = {"cores": os.cpu_count(), "front_ends": options.front_ends}
    print(json.dumps(facts | {"runs": results, "alone_first_event_ms": alone_ms}))


if __name__ == "__main__":
    main()
