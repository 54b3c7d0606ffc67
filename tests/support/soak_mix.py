"""Everything at once: clients of every kind and operators at work on one server, whose answers are checked each.

What a request gets alone is asked of a roomy server in this process, where near ties are noticed (tie_watch.py).
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faulty_server import Faults
from real_house import RealHouse, real_house
from said import Said, said, said_by_stream, said_so_far
from soak_record import Record
from soak_requests import Asked, can_stream, has_tokens, is_forkable, is_savable, prefix, some_request
from soak_server import (
    FRAMES,
    KEYS,
    MOST_FRAMES,
    MOST_SLOTS,
    SIZES,
    FrontEndDied,
    Life,
    SoakServer,
    running,
    write_template,
)
from structlog.testing import capture_logs
from tie_watch import NearTies
from tiny_model import attentive_parameters

from model.cpu_executor import CpuExecutor

AT_ONCE = 16
MOST_SAVED = 12
TIMEOUT = "length", "timeout"
COUNTED = (
    "preempt", "preempt_swap", "preempt_recompute", "swap_in", "swap_out", "swap_failed", "evict", "cow_fault", "fork",
)  # fmt: skip
"""Of the server's own counts."""
MOST_SAMPLES = 400
"""In a file."""
FORKED: dict[str, Any] = {
    "temperature": 1.5, "seed": 3, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True, "logprobs": 0,
    "frequency_penalty": 0, "presence_penalty": 0, "min_tokens": 0, "stop": [], "stop_token_ids": [],
}  # fmt: skip


class Alone:
    """What requests get when nobody else is there, one at a time."""

    def __init__(self, house: RealHouse, ties: NearTies) -> None:
        self._house, self._ties = house, ties
        self._turn = asyncio.Lock()

    async def ask(self, path: str, body: dict[str, Any]) -> list[Said] | None:
        """None: rounding may decide there."""
        async with self._turn:
            self._ties.found = False
            answer = said(path, await self._house.post(path, body))
            return None if self._ties.found else answer


@asynccontextmanager
async def alone_in(model: Path, folder: Path) -> AsyncIterator[Alone]:
    with pytest.MonkeyPatch.context() as patches, capture_logs():
        patches.setattr("service.assembly.random_parameters", attentive_parameters)
        chosen: dict[str, Any] = SIZES | {"dtype": "float32", "chat_template": str(write_template(folder))}
        async with real_house(patches, model, **chosen) as house:
            assert isinstance(house.engine.executor, CpuExecutor)
            yield Alone(house, NearTies(house.engine.executor, patches))


class Case(NamedTuple):
    """A request, and what it gets alone."""

    asked: Asked
    alone: list[Said]


async def some_cases(seed: int, alone: Alone, count: int) -> list[Case]:
    """So many without a near tie; asked for once, however often they are needed."""
    draw, cases = random.Random(seed), KNOWN.setdefault((seed, count), [])
    while len(cases) < count:
        asked = some_request(draw, len(cases))
        if (answer := await alone.ask(*asked)) is not None:
            cases.append(Case(asked, answer))
    return cases


KNOWN: dict[tuple[int, int], list[Case]] = {}
"""By seed and number."""


@dataclass
class Mix:
    """What happens in one life of a server."""

    life: Life
    server: SoakServer
    alone: Alone
    cases: list[Case]
    saved: list[tuple[str, Case]]  # files of checkpoints
    draw: random.Random
    record: Record
    happened: Counter[str] = field(default_factory=Counter)
    open: dict[str, Case | None] = field(default_factory=dict)  # request id -> what may be saved of it
    apart: float = 0.0  # log-probabilities, at most
    names: int = 0
    is_over: bool = False

    async def run(self, seconds: float, lacks: Callable[[], list[str]]) -> None:
        """Rounds of all requests until the time is over, and nothing lacks. Raises what fails first, in groups."""
        gate, until = asyncio.Semaphore(AT_ONCE), time.monotonic() + seconds
        async with asyncio.TaskGroup() as helpers:
            helpers.create_task(self._operate())
            helpers.create_task(self._audit())
            if self.life.front_ends:
                helpers.create_task(self._kill())
            while not self.happened["rounds"] or time.monotonic() < until or lacks():
                async with asyncio.TaskGroup() as clients:
                    for case in self.draw.sample(self.cases, len(self.cases)):
                        clients.create_task(self._client(gate, case))
                self.happened["rounds"] += 1
            self.is_over = True
        await self.server.until_idle()

    async def _client(self, gate: asyncio.Semaphore, case: Case) -> None:
        async with gate:
            self.names += 1
            name = f"{self.life.name}-{self.names}"
            headers = {"Authorization": f"Bearer {self.draw.choice(KEYS)}", "X-Request-Id": name}
            ways = [self._read_whole, self._read_stream, self._read_slowly, self._leave, self._abort]
            weights = [6, 8, 4, 3, 1]
            for way, weight, may in (
                (self._run_out_of_time, 2, has_tokens), (self._fork, 8, is_forkable), (self._restore, 4, None),
            ):  # fmt: skip
                if bool(self.saved) if may is None else may(case.asked):
                    ways.append(way)
                    weights.append(weight)
            (way,) = self.draw.choices(ways, weights)
            is_timed = way in (self._run_out_of_time, self._restore)
            self.open[name] = case if is_savable(case.asked) and not is_timed else None
            try:
                await way(case, headers)
                self.happened[way.__name__.strip("_")] += 1
            except FrontEndDied:
                self.happened["lost with a front end"] += 1
            except Exception as error:
                error.add_note(f"{name}, {way.__name__}: {case.asked}")
                raise
            finally:
                del self.open[name]

    def _check(self, found: list[Said], alone: list[Said]) -> None:
        for ours, theirs in zip(found, alone, strict=True):
            self.apart = max(self.apart, ours.check(theirs))
        self.happened["answers"] += 1

    # --- clients

    def _body(self, case: Case, **more: Any) -> tuple[str, dict[str, Any]]:
        path, body = case.asked
        more |= {"priority": self.draw.randint(-3, 3)} if has_tokens(case.asked) else {}
        return self.server.url + path, body | more

    async def _read_whole(self, case: Case, headers: dict[str, str]) -> None:
        url, body = self._body(case)
        status, text = await self.server.post(url, body, headers)
        assert status == 200, (body, text)
        self._check(said(case.asked[0], json.loads(text)), case.alone)

    async def _read_stream(self, case: Case, headers: dict[str, str], pause_s: float = 0) -> None:
        if not can_stream(case.asked):
            return await self._read_whole(case, headers)
        url, body = self._body(case, stream=True)
        came: list[bytes] = []
        try:
            status, text = await self.server.post(url, body, headers, came, pause_s)
        except FrontEndDied:
            self._check_part(b"".join(came).decode(errors="ignore"), case)
            raise
        assert status == 200, (body, text)
        return self._check(said_by_stream(case.asked[0], text), case.alone)

    def _check_part(self, text: str, case: Case) -> None:
        """What came of a stream that broke off."""
        if has_tokens(case.asked):
            for ours, theirs in zip(said_so_far(text), case.alone, strict=False):
                ours.check_beginning(theirs)

    async def _read_slowly(self, case: Case, headers: dict[str, str]) -> None:
        await self._read_stream(case, headers, pause_s=0.005 + self.draw.random() * 0.05)

    async def _leave(self, case: Case, headers: dict[str, str]) -> None:
        url, body = self._body(case, **({"stream": True} if can_stream(case.asked) else {}))
        came: list[bytes] = []
        try:
            async with asyncio.timeout(self.draw.random() * 0.3):
                status, text = await self.server.post(url, body, headers, came)
                assert status == 200, text
        except TimeoutError:
            self.happened["left"] += 1
            if can_stream(case.asked):
                self._check_part(b"".join(came).decode(errors="ignore"), case)

    async def _run_out_of_time(self, case: Case, headers: dict[str, str]) -> None:
        """What it has by then is the beginning of its answer; of a search, it is the best so far."""
        url, body = self._body(case, timeout_s=0.01 + self.draw.random() * 0.2)
        status, text = await self.server.post(url, body, headers)
        assert status == 200, (body, text)
        found = said(case.asked[0], json.loads(text))
        self.happened["timed out"] += any(one.end == TIMEOUT for one in found)
        for ours, theirs in zip(found, case.alone, strict=True):
            assert ours.end in (TIMEOUT, theirs.end), body
            if "use_beam_search" not in body:
                ours.check_beginning(theirs)

    async def _abort(self, case: Case, headers: dict[str, str]) -> None:
        """By its own client: it is over at once, or was."""
        url, body = self._body(case)
        name = headers["X-Request-Id"]

        async def end() -> None:
            await asyncio.sleep(self.draw.random() * 0.2)
            await self.server.delete(f"{self.server.url}/v1/requests/{name}", headers)

        (status, text), _ = await asyncio.gather(self.server.post(url, body, headers), end())
        if status == 200:
            self._check(said(case.asked[0], json.loads(text)), case.alone)
        else:
            assert status == 503, text
            self.happened["aborted"] += 1

    async def _fork(self, case: Case, headers: dict[str, str]) -> None:
        """A second answer from where the first stands, which is what a prompt of the same tokens gets."""
        url = f"{self.server.url}/v1/requests/{headers['X-Request-Id']}/fork"
        asked = {key: value for key, value in headers.items() if key != "X-Request-Id"}
        reading = asyncio.create_task(self._read_stream(case, headers))
        try:
            while not reading.done():
                await asyncio.sleep(self.draw.random() * 0.02)
                status, text = await self.server.post(url, FORKED, asked)
                if status == 200:
                    await self._check_fork(case, json.loads(text))
                    break
                assert status < 500 or status == 503, text
        finally:
            await reading

    async def _check_fork(self, case: Case, answer: Any) -> None:
        path, body = case.asked
        (choice,) = answer["choices"]
        prompt = choice["prompt_token_ids"]
        assert prompt == body["prompt"] + case.alone[0].tokens[: answer["forked_at"]]
        self.happened["forks"] += 1
        if not {"structured_outputs", "response_format"} & body.keys():
            left_out = {"prompt_logprobs", "echo"}
            same = {name: value for name, value in body.items() if name not in left_out} | FORKED | {"prompt": prompt}
            if (alone := await self.alone.ask(path, same)) is not None:
                (found,) = said(path, answer)
                # its text begins with what the parent's last character lacked, where that was cut
                self._check([found], [replace(alone[0], content=found.content)])

    async def _restore(self, _: Case, headers: dict[str, str]) -> None:
        """Go on with what was saved, here or in the life before: the rest of its answer."""
        file, case = self.saved.pop(self.draw.randrange(len(self.saved)))
        body = {"path": file, "return_token_ids": True, "request_id": headers["X-Request-Id"]}
        status, text = await self.server.act("restore", body, again=False)
        assert status == 200, (file, text)
        answer = json.loads(text)
        at, (found,) = answer["restored_tokens"], said(case.asked[0], answer)
        found.check_rest(case.alone[0], at)
        self.happened["answers"] += 1

    # --- operators

    async def _operate(self) -> None:
        while not self.is_over:
            await asyncio.sleep(0.02)
            savable = [(name, case) for name, case in self.open.items() if case is not None]
            if savable and len(self.saved) < MOST_SAVED and self.draw.random() < 0.2:
                await self._save(*self.draw.choice(savable))
                continue
            path, body = self._some_action(await self._somebody())
            status = await self._act(path, body)
            of, _, action = path.rpartition("/")
            if status == 200 and (back := {"pause": "resume", "swap_out": "swap_in"}.get(action)):
                await asyncio.sleep(0.01 + 0.05 * self.draw.random())
                await self._act(f"{of}/{back}", {})  # else it stands still until chance lets it go on

    async def _act(self, path: str, body: dict[str, Any]) -> int:
        status, _ = await self.server.act(path, body)
        self.happened[f"{path.split('/')[-1] if path.startswith('sequences') else path} {status}"] += 1
        return status

    async def _save(self, name: str, case: Case) -> None:
        if await self._act(f"sequences/{name}/checkpoint", {"path": name}) == 200:
            self.saved.append((name, case))

    async def _somebody(self) -> str:
        """Of those that are open, most of whom wait; or of those that decode, who have pages to swap."""
        if self.draw.random() < 0.5:
            found = (await self.server.view("sequences"))["sequences"]
            if decoding := [each["id"] for each in found if each["state"] == "decode"]:
                return self.draw.choice(decoding)
        return self.draw.choice(list(self.open)) if self.open else "nobody"

    def _some_action(self, of: str) -> tuple[str, dict[str, Any]]:
        draw = self.draw
        sizes = {"frames": draw.randint(FRAMES - 8, MOST_FRAMES)}
        sizes |= {"slots": draw.randint(0, MOST_SLOTS)} if self.life.has_swap else {}
        actions: list[tuple[str, dict[str, Any]]] = [
            (f"sequences/{of}/swap_out", {}),
            (f"sequences/{of}/swap_in", {}),
            (f"sequences/{of}/pause", {}),
            (f"sequences/{of}/priority", {"priority": draw.randint(-5, 5)}),
            (f"sequences/{of}/oom_score_adj", {"oom_score_adj": draw.randint(-999, 999)}),
            (f"sequences/{of}/madvise", {"advice": draw.choice(["willneed", "cold", "pageout", "dontneed"])}),
            ("page_cache/pin", {"owner": "soak", "tokens": prefix(draw, 32), "ttl_s": 0.2}),
            ("page_cache/unpin", {"owner": "soak"}),
            ("page_cache/drop", {"level": draw.choice([1, 2, 3])}),
            ("watermarks", {"min": 0, "low": draw.randint(1, 3), "high": draw.randint(3, 6)}),
            ("overcommit", {"mode": draw.choice(["heuristic", "always"])}),
            ("resize", sizes),
            ("tenants/second", {"high": draw.randint(15, 20), "weight": draw.randint(1, 5)}),
        ]
        return draw.choice(actions)

    async def _kill(self) -> None:
        """Front ends, one at a time."""
        while not self.is_over:
            for _ in range(self.draw.randint(10, 40)):
                await asyncio.sleep(0.2)
                if self.is_over:
                    return
            await self.server.kill_front_end(self.draw.randrange(self.life.front_ends), self.life.front_ends)
            self.happened["front ends killed"] += 1

    async def _audit(self) -> None:
        """Each second, between two steps."""
        while not self.is_over:
            await asyncio.sleep(1)
            audit, counters, swap = [await self.server.view(name) for name in ("audit", "vmstat", "swaps")]
            assert audit["balanced"], audit
            assert audit["resident"] == audit["references"], audit
            assert audit["proportional"] == pytest.approx(audit["active"]), audit
            assert audit["free"] + audit["cached"] + audit["active"] == audit["total"], audit
            self.happened["audits"] += 1
            self.happened |= {f"server's {name}": counters[name] for name in COUNTED}
            self.record.add(self.life.name, self.happened, audit, counters, swap, self.server.resident_bytes())


LIVES = [
    Life("swap", faults=Faults(no_memory=0.1)),
    Life("no-swap", front_ends=0, has_swap=False, faults=Faults(no_memory=0.1)),
    Life("copies-fail", faults=Faults(no_memory=0.1, copies=0.3)),  # of few: most victims are computed anew
]


@dataclass
class Ran:
    """A mix, and what came of it: what is wanted happens at least once, if the last life takes longer for it."""

    lives: list[Life]
    wanted: Sequence[str] = ()
    record: Record = field(default_factory=Record)
    happened: Counter[str] = field(default_factory=Counter)  # in all lives
    apart: float = 0.0

    async def run(self, seed: int, requests: int, seconds: float, model: Path, folder: Path) -> None:
        """Servers one after the other, `seconds` in all: what one saves the next may restore."""
        draw = random.Random(seed)
        saved: list[tuple[str, Case]] = []
        async with alone_in(model, folder) as alone:
            cases = await some_cases(seed, alone, requests)
            for life in self.lives:
                async with running(life, model, folder) as server:
                    mix = Mix(life, server, alone, cases, saved, draw, self.record)
                    try:
                        await mix.run(seconds / len(self.lives), lambda life=life, mix=mix: self._lacking(life, mix))
                        await server.end()
                    finally:
                        self.happened += mix.happened
                        self.apart = max(self.apart, mix.apart)

    def _lacking(self, life: Life, mix: Mix) -> list[str]:
        """What must happen and has not; only the last life goes on for it."""
        is_last = life is self.lives[-1]
        return [name for name in self.wanted if not self.happened[name] + mix.happened[name]] if is_last else []

    def write(self, path: Path, **facts: Any) -> None:
        """As JSON: facts, counts, and every so many samples."""
        samples = self.record.samples
        facts |= {"happened": dict(sorted(self.happened.items())), "log-probabilities apart": self.apart}
        facts["samples"] = samples[:: 1 + len(samples) // MOST_SAMPLES]
        path.write_text(json.dumps(facts, indent=0).replace("\n", " ").replace('{ "s"', '\n{ "s"'))
