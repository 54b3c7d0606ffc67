"""The views of memory and Sequences: what always adds up, JSON and text agree, and nothing of a prompt is told."""

import asyncio
import json
import re
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from stepped_engine import PAGE, SteppedEngine

from mm import Watermarks
from mm.frame_views import STATE_BITS, FrameState, SlotState, frame_map
from model.executor import DeviceMemory
from service import admin
from service.admin_text import RENDERERS
from service.errors import BadRequest, NotFound, QueueFull
from service.questions import Answers, Look


def look(house: SteppedEngine, view: str, of: str = "", **query: Any) -> Any:
    return json.loads(house.look(view, of, **query))


async def under_load(seed: int = 0, steps: int = 120, **more: Any) -> SteppedEngine:
    """After some steps of a load: Sequences run, wait, and are in swap; something is cached, something pinned."""
    house = SteppedEngine(seed, **more)
    for _ in range(steps):
        house.act()
        await house.step()
    return house


@pytest.mark.parametrize("seed", range(3))
async def test_totals_agree_with_the_audit_at_any_moment(seed: int) -> None:
    """total = free + cached + active; Σ pss over all holders = active, Σ rss = Σ references; free ⇔ no reference."""
    house = SteppedEngine(seed)
    seen: Counter[str] = Counter()
    for _ in range(120):
        house.act()
        await house.step()
        audit = look(house, "audit")
        assert audit["balanced"], audit["discrepancies"]
        assert audit["total"] == audit["free"] + audit["cached"] + audit["active"] == 40
        assert audit["proportional"] == pytest.approx(audit["active"], abs=1e-4)
        assert audit["resident"] == audit["references"]
        listed = look(house, "sequences", limit=1000)
        holders = [*listed["sequences"], *listed["holders"]]
        assert sum(each["pss"] for each in holders) == pytest.approx(audit["active"], abs=1e-4)
        assert sum(each["rss"] for each in holders) == audit["references"]
        summary = look(house, "frames/summary")["frames"]
        assert summary["free"] == audit["free"]
        assert summary["inactive"] + summary["active"] == audit["cached"]
        all_frames = look(house, "frames", limit=1000)["frames"]
        unheld = sum(each["references"] == 0 for each in all_frames)
        assert unheld == audit["free"] + audit["cached"]
        assert sum(each["references"] for each in all_frames) == audit["references"]
        for each in all_frames:
            assert (each["references"] == 0) == (each["state"] in ("free", "inactive", "active"))
            assert len(each["owners"]) == min(each["references"], 8) or each["state"] == "copying"
        seen.update({each["state"] for each in all_frames} | {each["state"] for each in listed["sequences"]})
    assert {"free", "private", "shared", "inactive", "active", "pinned", "copying"} <= seen.keys()
    assert {"queued", "prefill", "decode", "swapped"} <= seen.keys()


async def test_an_audit_of_an_idle_server_lets_others_in_on_its_way() -> None:
    house, answers = await under_load(), Answers()
    house.inspector.answer_with(answers)
    asked, turns = asyncio.create_task(answers.ask(Look("audit"))), 0
    while not asked.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 9, "a stop after each part of memory"
    facts, at_once = json.loads(asked.result()), look(house, "audit")
    assert {name: value for name, value in facts.items() if name not in ("ts", "uptime_s")} == {
        name: value for name, value in at_once.items() if name not in ("ts", "uptime_s")
    }


async def test_an_audit_amid_steps_is_of_one_moment() -> None:
    """What it has seen is void when a step begins or ends at one of its stops: then it finds nothing that is not so."""
    house, answers = await under_load(), Answers()
    house.inspector.answer_with(answers)

    def until_it_changes() -> Iterator[str | None]:
        references = house.memory.frames.references.tobytes()
        for _ in range(1 + turn % 8):
            yield None
            if house.memory.frames.references.tobytes() != references:
                yield "memory is another"

    house.memory.auditing = until_it_changes  # type: ignore[method-assign]
    for turn in range(200):
        house.act()
        step = asyncio.create_task(house.step())
        for _ in range(turn % 3):
            await asyncio.sleep(0)
        facts = json.loads(await answers.ask(Look("audit")))
        await step
        assert facts["balanced"], facts["discrepancies"]
        assert facts["resident"] == facts["references"]
    del house.memory.auditing
    house.memory.frames.references[0] += 1
    assert not json.loads(await answers.ask(Look("audit")))["balanced"]


@pytest.mark.parametrize("seed", range(2))
async def test_no_frame_is_writable_by_two(seed: int) -> None:
    house = SteppedEngine(seed)
    for _ in range(100):
        house.act()
        await house.step()
        writable: Counter[int] = Counter()
        for each in look(house, "sequences", limit=1000)["sequences"]:
            pages = look(house, "sequences/{of}/pagemap", each["id"], limit=1000)["pages"]
            writable.update(page["number"] for page in pages if page["is_writable"])
            runs = look(house, "sequences/{of}/maps", each["id"])["runs"]
            assert sum(run["end"] - run["start"] for run in runs) == sum(page["tokens"] for page in pages)
            covered = [page["is_writable"] for page in pages]
            assert covered == [
                "w" in run["flags"] for run in runs for _ in range(-(-(run["end"] - run["start"]) // PAGE))
            ]
        assert max(writable.values(), default=0) <= 1


async def test_a_map_has_the_state_of_every_frame_and_slot() -> None:
    house = await under_load(1)
    found, memory = frame_map(house.memory), house.memory
    assert len(found.states) == len(found.shares) == 40
    assert len(found.slots) == 24
    states = [FrameState(value) for value in (found.states & STATE_BITS).tolist()]
    audit = look(house, "audit")
    assert states.count(FrameState.FREE) == audit["free"]
    assert int(found.shares.sum()) == audit["references"]
    shared = found.shares[np.array(states) == FrameState.SHARED]
    assert (shared > 1).all()
    assert [SlotState(value) for value in found.slots.tolist()].count(SlotState.FREE) == memory.swap.free_slots
    assert ((found.states & 0x10 > 0) == (memory.cache.entries_of_frames >= 0)).all()


async def test_counters_only_grow() -> None:
    house = SteppedEngine(3)
    before: dict[str, Any] = {}
    for _ in range(150):
        house.act()
        await house.step()
        now = look(house, "vmstat")
        assert all(now[name] >= value for name, value in before.items() if name != "ts")
        before = now
    for name in (
        "alloc",
        "free",
        "alloc_stall",
        "evict",
        "evict_age_ms",
        "swap_out",
        "swap_in",
        "preempt",
        "cow_fault",
    ):
        assert before[name] > 0, name
    assert before["oom_abort"] == 0


async def test_every_view_has_a_head_and_its_text_the_same_facts() -> None:
    house = await under_load(2)
    sequence = look(house, "sequences")["sequences"][0]["id"]
    subjects = {"sequences": sequence, "frames": "3", "tenants": "small"}
    for view in admin.VIEWS:
        facts = look(house, view, subjects.get(view.split("/")[0], "") if "{of}" in view else "")
        assert list(facts)[:3] == ["ts", "step", "uptime_s"]
        text = RENDERERS[view](facts)
        assert text.endswith("\n") or text == ""
        if view not in ("threads", "stacks", "profile"):  # which quote code
            assert not re.search(r"\b(True|False|None)\b", text), view  # Python's words


async def test_a_pulse_has_a_line_for_each_fact() -> None:
    house = await under_load(2)
    facts, lines = look(house, "pulse"), text(house, "pulse")
    assert f"frames.free {facts['frames']['free']}" in lines
    assert f"pressure.memory.some.total_us {facts['pressure']['memory']['some']['total_us']}" in lines
    assert all(re.fullmatch(r"[a-z_.0-9]+ [0-9.e+-]+", line) for line in lines)


# ---------------------------------------------------------------- texts, read as the kernel's own would be


def text(house: SteppedEngine, view: str, of: str = "", **query: Any) -> list[str]:
    return RENDERERS[view](look(house, view, of, **query)).splitlines()


async def test_vmstat_reads_like_the_kernels() -> None:
    house = await under_load()
    parsed = {name: int(value) for name, value in (line.split(" ") for line in text(house, "vmstat"))}
    assert parsed == dict(list(look(house, "vmstat").items())[3:])


@pytest.mark.parametrize("view", ["pressure", "pressure/compute"])
async def test_pressure_reads_like_the_kernels(view: str) -> None:
    house = await under_load()
    line = re.compile(r"(some|full) avg10=(\d+\.\d\d) avg60=(\d+\.\d\d) avg300=(\d+\.\d\d) total=(\d+)")
    parsed = [line.fullmatch(each) for each in text(house, view)]
    assert [found and found[1] for found in parsed] == ["some", "full"]
    assert int(parsed[0][5]) > 0  # type: ignore[index]


async def test_buddyinfo_reads_like_the_kernels_and_counts_every_free_frame() -> None:
    house = await under_load()
    (line,) = text(house, "buddyinfo")
    found = re.fullmatch(r"Node (\d+), zone +(\w+) ((?: *\d+ )+)", line + "")
    assert found is not None
    counts = list(map(int, found[3].split()))
    free = house.memory.free_frames
    assert (
        sum(count << k for k, count in enumerate(counts))
        <= free
        <= sum(c * (2 ** (k + 1) - 1) for k, c in enumerate(counts))
    )
    facts = look(house, "buddyinfo")
    assert 0 <= facts["allocated_tokens"] - facts["used_tokens"] < PAGE * 12


async def test_zoneinfo_reads_like_the_kernels_and_tells_the_watermarks_of_now() -> None:
    house = await under_load()
    house.memory.reclaimer.watermarks = Watermarks(min=1, low=5, high=9)
    zone, free, *lines = text(house, "zoneinfo")
    assert re.fullmatch(r"Node 0, zone +KV", zone)
    assert int(re.fullmatch(r"  pages free +(\d+)", free)[1]) == house.memory.free_frames  # type: ignore[index]
    parsed = {name: int(value) for name, value in (line.split() for line in lines)}
    assert parsed == {"min": 1, "low": 5, "high": 9, "present": 40, "managed": 40}
    facts = look(house, "zoneinfo")
    assert facts["overcommit"] == str(house.memory.ledger.mode)
    assert facts["slots_managed"] <= facts["slots_present"] == house.memory.swap.total


async def test_pools_read_like_slabinfo() -> None:
    house = await under_load()
    version, head, *lines = text(house, "pools")
    assert version == "slabinfo - version: 2.1"
    assert head.startswith("# name ")
    for line in lines:
        caches, tunables, slabs = line.split(" : ")
        assert tunables.split()[0] == "tunables"
        assert slabs.split()[0] == "slabdata"
        _, active, total, *_ = caches.split()
        assert 0 <= int(active) <= int(total)
    frames = look(house, "pools")["pools"][0]
    assert frames["active_objs"] <= frames["high_water"] <= 40


async def test_pools_tell_what_is_taken_of_a_device_if_there_is_one() -> None:
    house = await under_load(steps=1)
    assert not {"step_graphs", "scratch"} & {pool["name"] for pool in look(house, "pools")["pools"]}
    house.executor.in_device = DeviceMemory(activations_peak_bytes=5000, graphs=3, most_graphs=8, graph_bytes=600)
    pools = {pool["name"]: pool for pool in look(house, "pools")["pools"]}
    graphs, scratch = pools["step_graphs"], pools["scratch"]
    assert (graphs["active_objs"], graphs["num_objs"], graphs["obj_bytes"]) == (3, 8, 200)
    assert scratch["obj_bytes"] == 5000


async def test_maps_read_like_the_kernels() -> None:
    house = await under_load()
    line = re.compile(r"([0-9a-f]{8})-([0-9a-f]{8}) ([r-][w-]-[ps]) ([0-9a-f]{8}) (\d\d:\d\d) (\d+) +\[(\S+)\]")
    for each in look(house, "sequences", limit=1000)["sequences"]:
        end = 0
        for found in map(line.fullmatch, text(house, "sequences/{of}/maps", each["id"])):
            assert found is not None
            assert int(found[1], 16) == end < int(found[2], 16)
            end = int(found[2], 16)


async def test_maps_tell_pages_that_were_found_and_those_of_relatives_from_own_ones() -> None:
    """Whoever computed a page: that others share it does not make it theirs."""
    house = SteppedEngine(frames=80)

    def origins(number: int) -> list[tuple[int, int, str]]:
        runs = look(house, "sequences/{of}/maps", f"0.{number}")["runs"]
        return [(run["start"], min(run["end"], 12), run["origin"]) for run in runs if run["start"] < 12]

    first = house.submit([*range(1, 11)], 60)
    for _ in range(4):
        await house.step()
    second = house.submit([*range(1, 9), 20, 21, 22, 23], 60)
    third = house.submit([*range(30, 42)], 60, choices=2)
    for _ in range(6):
        await house.step()
    flags = {run["flags"][-1] for run in look(house, "sequences/{of}/maps", f"0.{first}")["runs"]}
    assert flags == {"s", "p"}
    assert {origin for *_, origin in origins(first)} == {"own"}
    assert origins(second) == [(0, 8, "prefix"), (8, 12, "own")]
    assert {origin for *_, origin in origins(third)} == {"own"}
    assert origins(third + 1)[0] == (0, 8, "parent")


async def test_smaps_read_like_the_kernels_rollup() -> None:
    house = await under_load()
    for each in look(house, "sequences", limit=1000)["sequences"]:
        head, *lines = text(house, "sequences/{of}/smaps", each["id"])
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{8} ---p 00000000 00:00 0 +\[rollup\]", head)
        parsed = {
            name: float(value) for name, value in (re.match(r"(\w+): +([\d.]+) \w+$", line).groups() for line in lines)
        }  # type: ignore[union-attr]
        assert parsed["Rss"] == parsed["Shared_Clean"] + parsed["Private_Dirty"] == each["rss"]
        assert parsed["Pss"] == pytest.approx(each["pss"], abs=0.005)


async def test_status_reads_like_the_kernels() -> None:
    house = await under_load()
    of = look(house, "sequences")["sequences"][0]["id"]
    parsed = dict(line.split(":\t") for line in text(house, "sequences/{of}/status", of))
    assert parsed["Id"] == of
    assert int(parsed["PromptTokens"]) > 0


async def test_swaps_read_like_the_kernels() -> None:
    house = await under_load()
    while not look(house, "swaps")["slots"]["sequence"]:
        house.act()
        await house.step()
    head, line = text(house, "swaps")
    assert head.split() == ["Filename", "Type", "Size", "Used", "Priority"]
    name, kind, size, used, priority = line.split()
    assert (name, kind, int(size), priority) == ("host-memory", "ram", 24, "-1")
    facts = look(house, "swaps")
    assert int(used) == facts["used"] == 24 - facts["slots"]["free"]
    assert sum(each["slots"] for each in facts["holders"]) >= facts["slots"]["sequence"] > 0


async def test_the_trace_reads_like_ftraces() -> None:
    house = await under_load()
    lines = [line for line in text(house, "trace", limit=1000) if not line.startswith("#")]
    form = re.compile(r" *(.+)-(\d+) +\[(\w+)\] (\d+\.\d+): (\w+): place=(-?\d+) count=(\d+)")
    parsed = [form.fullmatch(line) for line in lines]
    assert all(parsed)
    assert {found[5] for found in parsed if found} >= {"allocate", "release", "swap_out", "complete"}


async def test_a_tenant_has_the_files_of_a_cgroup() -> None:
    house = await under_load()
    facts = look(house, "tenants/{of}", "small")
    parts = ("\n" + RENDERERS["tenants/{of}"](facts)).split("\n==> ")[1:]
    files = dict(part.split(" <==\n") for part in parts)
    assert files["memory.max"].strip() == "24"
    assert files["memory.low"].strip() == "0"
    assert int(files["memory.current"]) <= int(files["memory.peak"]) <= 24
    assert {line.split()[0] for line in files["memory.events"].splitlines()} >= {"low", "high", "max"}
    assert files["memory.pressure"].startswith("some avg10=")
    default = look(house, "tenants/{of}", "default")
    assert default["max"] is None
    assert "==> memory.max <==\nmax\n" in RENDERERS["tenants/{of}"](default)
    with pytest.raises(NotFound):
        look(house, "tenants/{of}", "nobody")


# ---------------------------------------------------------------- what single views say


async def test_the_queue_says_why_each_waits() -> None:
    house = SteppedEngine()
    for number in range(12):
        house.submit([number] * 20, 40)
    small = [house.submit([number, 3] * 10, 40, tenant="small") for number in range(3)]
    for _ in range(12):
        await house.step()
    facts = look(house, "scheduler", limit=100)
    assert facts["waiting"] == len(facts["queue"]) > 0
    reasons = {line["reason"] for line in facts["queue"]}
    assert reasons & {"frames", "tenant_limit"}
    assert reasons <= {"frames", "tenant_limit", "turn", "places", "tokens_in_flight"}
    assert small


async def test_the_score_table_names_whom_it_would_hit() -> None:
    house = await under_load()
    facts = look(house, "oom_score")
    scores = [line["score"] for line in facts["candidates"] if line["score"] is not None]
    assert scores == sorted(scores, reverse=True)
    assert sum(line["is_next"] for line in facts["candidates"]) >= 1


async def test_decisions_to_preempt_are_in_the_trace_with_their_table() -> None:
    house = await under_load(steps=150)
    facts = look(house, "trace", event="preempt", limit=1000)
    assert facts["events"]
    decision = facts["preemptions"][-1]
    assert set(decision["victims"]) <= {line["request"] for line in decision["candidates"]}
    assert decision["frames"] > 0
    of_one = look(house, "trace", request=facts["events"][-1]["request"], limit=1000)["events"]
    assert {event["request"] for event in of_one} == {facts["events"][-1]["request"]}
    newer = look(house, "trace", after=facts["events"][-1]["number"], limit=10_000)["events"]
    assert all(event["number"] > facts["events"][-1]["number"] for event in newer)
    with pytest.raises(BadRequest):
        look(house, "trace", event="lunch")


async def test_a_missed_prefix_says_why_and_where() -> None:
    house = SteppedEngine()
    prompt = list(range(20))
    for _ in range(2):
        house.submit(prompt, 2)
        for _ in range(8):
            await house.step()
    newest, oldest = look(house, "misses")["misses"]
    assert (oldest["reason"], oldest["cached_tokens"]) == ("never_computed", 0)
    assert (newest["reason"], newest["cached_tokens"]) == ("last_token", 19)
    found = look(house, "page_cache", prefix_of=",".join(map(str, [*prompt[:12], 49, *prompt[13:]])))
    assert (found["cached_tokens"], len(found["found"])) == (12, 3)
    assert found["miss"]["reason"] == "never_computed"
    with pytest.raises(BadRequest):
        look(house, "page_cache", prefix_of="1,x")


async def test_no_token_of_a_prompt_is_told_unless_the_server_may() -> None:
    for shows in (False, True):
        house = await under_load(steps=60, shows_text=shows)
        assert (b"token_ids" in house.look("page_cache")) is shows


async def test_cached_pages_say_how_deep_they_are() -> None:
    house = SteppedEngine()
    house.submit(list(range(20)), 2)
    for _ in range(8):
        await house.step()
    assert sorted(page["depth_tokens"] for page in look(house, "page_cache")["top"]) == [4, 8, 12, 16, 20]


async def test_a_frame_tells_its_history() -> None:
    house = await under_load()
    facts = look(house, "frames/{of}", "5")
    assert facts["frame"] == 5
    assert facts["history"][0]["kind"] in ("allocate", "copy")
    for wrong in ("40", "-1", "x", ""):
        with pytest.raises(NotFound):
            look(house, "frames/{of}", wrong)


async def test_steps_are_kept_in_order() -> None:
    house = await under_load(steps=60)
    steps = look(house, "steps", limit=20)["steps"]
    assert len(steps) == 20
    assert [entry["step"] for entry in steps] == list(range(steps[0]["step"], steps[0]["step"] + 20))
    assert all(entry["batch"] >= entry["decode_tokens"] for entry in steps)
    assert look(house, "steps", after=steps[-2]["step"])["steps"] == steps[-1:]


async def test_steps_tell_whether_there_was_a_graph_for_them_and_vmstat_counts_them() -> None:
    house = SteppedEngine()
    house.executor.graph_hit = lambda plan: plan.decodes == len(plan.rows)
    house.submit([1, 2, 3], 6)
    for _ in range(8):
        await house.step()
    steps = look(house, "steps")["steps"]
    assert [entry["graph_hit"] for entry in steps] == [entry["prefill_tokens"] == 0 for entry in steps]
    counted = look(house, "vmstat")
    assert (counted["graph_hit"], counted["graph_miss"]) == (5, 1)


async def test_where_there_are_no_graphs_no_step_misses_one() -> None:
    house = await under_load(steps=5)
    counted = look(house, "vmstat")
    assert (counted["graph_hit"], counted["graph_miss"]) == (0, 0)
    assert {entry["graph_hit"] for entry in look(house, "steps")["steps"]} == {None}


async def test_a_sequence_is_found_by_its_name_or_its_request() -> None:
    house = SteppedEngine()
    house.submit([1, 2, 3], 30)
    house.submit([4, 5, 6], 30, choices=2)
    await house.step()
    assert look(house, "sequences/{of}/status", "request 1")["id"] == "0.1"
    assert look(house, "sequences/{of}/status", "0.1")["request"] == "request 1"
    with pytest.raises(NotFound, match=r"2 sequences: ask for one of 0\.2, 0\.3"):
        look(house, "sequences/{of}/status", "request 2")
    with pytest.raises(NotFound):
        look(house, "sequences/{of}/status", "0.9")


# ---------------------------------------------------------------- the process


async def test_settings_are_shown_with_their_origin_and_without_secrets() -> None:
    house = await under_load(steps=1)
    facts = look(house, "config")
    shown = {each["name"]: each for each in facts["settings"]}
    assert shown["admin_api_key"] == {"name": "admin_api_key", "value": "***", "origin": "env"}
    assert shown["page_size"] == {"name": "page_size", "value": 16, "origin": "default"}
    assert "secret" not in json.dumps(facts)
    parsed = tomllib.loads("\n".join(text(house, "config")))
    assert parsed["watermarks"] == "1%,2%,4%"
    assert "admin_api_key" not in parsed


async def test_threads_and_stacks_show_where_the_process_is() -> None:
    house = await under_load(steps=1)
    named = [each for each in look(house, "threads")["threads"] if each["name"] == "MainThread"]
    assert len(named) == 1
    assert named[0]["is_python"]
    stacks = look(house, "stacks")
    main = next(each for each in stacks["threads"] if each["name"] == "MainThread")
    assert any("process_views.py" in line and line.endswith(" stacks") for line in main["frames"])
    assert any("test_threads_and_stacks" in line for task in stacks["tasks"] for line in task["frames"])


async def test_a_profile_finds_what_takes_the_time_and_is_taken_one_at_a_time() -> None:
    house = await under_load(steps=1)
    number = look(house, "profile/start", "0.4")["number"]
    with pytest.raises(QueueFull):
        look(house, "profile/start", "0.4")

    def busy_function() -> None:
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            pass

    busy_function()
    facts = look(house, "profile/result", str(number))
    assert facts["is_over"]
    assert any("busy_function" in stack["stack"][-1] for stack in facts["stacks"])
    with pytest.raises(NotFound):
        look(house, "profile/result", "99")
