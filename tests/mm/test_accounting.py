"""What is shown adds up, and every discrepancy is found and told with its owner."""

import numpy as np
import pytest
from memory_house import House

from mm import MemoryCorruption, MemoryManager
from mm.flight_recorder import EventKind, FlightRecorder
from mm.pressure import PressureMeter

P = 4


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100_000, count).tolist()


def test_proportional_sizes_add_up_to_the_frames_in_use() -> None:
    house, prefix = House(), tokens(2 * P, 1)
    guests = [house.start([*prefix, *tokens(n, n)]) for n in (1, 5, 9)]
    sizes = [house.memory.sequence_memory(guest.space) for guest in guests]
    assert [size.resident for size in sizes] == [3, 4, 5]
    assert [size.private for size in sizes] == [1, 2, 3]
    assert [size.shared for size in sizes] == [2, 2, 2]
    assert [size.cached for size in sizes] == [2, 3, 4]
    assert [size.unused_tokens for size in sizes] == [3, 3, 3]
    assert sum(size.proportional for size in sizes) == pytest.approx(house.memory.information().active_frames)


def test_maps_show_runs_of_equal_pages() -> None:
    house, prefix = House(slots=8), tokens(2 * P, 1)
    house.start([*prefix, 1])
    guest = house.start([*prefix, *tokens(2 * P + 1, 2)])
    rows = [(run.first_page, run.pages, run.place) for run in house.memory.maps(guest.space)]
    assert rows == [(0, 2, "frame"), (2, 2, "frame"), (4, 1, "frame")]
    shared, cached, own = house.memory.maps(guest.space)
    assert (shared.is_shared, shared.is_cached, shared.is_writable) == (True, True, False)
    assert (cached.is_shared, cached.is_cached, cached.is_writable) == (False, True, False)
    assert (own.is_shared, own.is_cached, own.is_writable) == (False, False, True)
    house.finish(house.memory.swap_out([guest.space]))
    assert [(run.pages, run.place) for run in house.memory.maps(guest.space)] == [(2, "frame"), (3, "swap")]
    size = house.memory.sequence_memory(guest.space)
    assert (size.resident, size.swap, size.moving) == (2, 3, 0)
    assert house.memory.maps(house.memory.create("empty")) == []


def test_waste_is_bounded_by_one_page_a_sequence() -> None:
    house = House()
    for count in range(1, 9):
        house.start(tokens(count, count))
    now = house.memory.information()
    assert now.unused_tokens == sum(-count % P for count in range(1, 9))


def test_pressure_follows_the_share_of_time_that_somebody_waited() -> None:
    """A fake clock: one second in two for ten minutes, then nobody for ten seconds."""
    meter = PressureMeter()
    for second in range(0, 600, 2):
        meter.report(float(second), waiting=1, progressing=1)
        meter.report(second + 1.0, waiting=0, progressing=2)
    now = meter.read(600.0)
    assert now.some.total_us == 300_000_000
    assert now.some.avg60 == pytest.approx(50, abs=1)
    assert now.some.avg300 == pytest.approx(50 * (1 - np.exp(-2)), abs=1)
    assert now.full.total_us == 0
    assert meter.read(610.0).some.avg10 == pytest.approx(50 * np.exp(-1), rel=0.1)


def test_full_pressure_is_when_nobody_gets_on() -> None:
    meter = PressureMeter()
    meter.report(0.0, waiting=2, progressing=0)
    meter.report(3.0, waiting=2, progressing=1)
    now = meter.read(5.0)
    assert (now.some.total_us, now.full.total_us) == (5_000_000, 3_000_000)


def test_pressure_is_told_for_each_tenant() -> None:
    house = House()
    house.memory.turn(0.0, 1)
    house.memory.report_pressure(waiting={"a": 1}, progressing={"b": 3})
    house.memory.turn(2.0, 2)
    by_name = {tenant.name: tenant.pressure for tenant in house.memory.tenant_memory()}
    assert by_name["a"].full.total_us == by_name["a"].some.total_us == 2_000_000
    assert by_name["b"].some.total_us == 0
    system = house.memory.pressure.read(2.0)
    assert (system.some.total_us, system.full.total_us) == (2_000_000, 0)


def test_the_recorder_tells_what_happened_to_whom_and_when() -> None:
    house = House(frames=4)
    house.memory.turn(1.0, 11)
    house.run(tokens(3 * P, 1), tenant="a")
    house.memory.turn(2.0, 12)
    house.start(tokens(3 * P, 2), tenant="b")
    evictions = [event for event in house.memory.find_events(1_000) if event.kind == "evict"]
    assert [(event.step, event.now, event.owner, event.tenant) for event in evictions] == [
        (12, 2.0, "request 1", "a")
    ] * 2
    mine = house.memory.find_events(1_000, owner="request 2")
    assert [event.kind for event in mine] == ["allocate"] * 3


def test_the_recorder_keeps_the_last_events_around_its_end() -> None:
    recorder = FlightRecorder(capacity=8)
    for number in range(5):
        recorder.record(EventKind.FORK, 1, 0, number, 1)
    frames = np.arange(100, 106, dtype=np.int32)
    recorder.record_frames(EventKind.ALLOCATE, np.full(6, 2), np.zeros(6, np.int32), frames)
    assert recorder.recorded == 11
    kept = recorder.find().tolist()
    assert [recorder.at(number)[1][4] for number in kept] == [3, 4, 100, 101, 102, 103, 104, 105]
    assert kept[-2:] == [9, 10]


def test_a_refused_allocation_is_recorded() -> None:
    house = House(frames=2)
    with pytest.raises(Exception, match="needs 3 frames"):
        house.start(tokens(3 * P, 1))
    event = house.memory.find_events(1)[-1]
    assert (event.kind, event.owner, event.place, event.count) == ("deny", "request 1", 2, 3)
    assert house.memory.counters().deny == 1


def test_the_audit_names_the_last_owner() -> None:
    house = House()
    guest = house.start(tokens(2 * P, 1))
    house.memory.frames.references[guest.frames[1]] += 1
    with pytest.raises(MemoryCorruption, match=r"frame 1 \(last of request 1\): 2 references, 1 holders"):
        house.memory.check_invariants()


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda m: m.lru.lists.sizes.__setitem__(0, 7), "list 0 has 0 pages, counted 7"),
        (lambda m: m.frames.sealed.__setitem__(5, True), "frame 5: sealed True, should be False"),
        (lambda m: m.tables.barred.__setitem__(0, 1), "barred 1, 0 in swap, 0 leaving"),
        (lambda m: setattr(m.ledger, "committed", 3), "3 frames committed, counted 0"),
        (lambda m: m.tenants.usage.__setitem__(0, 9), "tenant default is charged 9 frames, counted 0"),
        (lambda m: m.frames.pins.__setitem__(2, 1), "frame 2: 1 pins, 0 copies in flight"),
        (lambda m: m.swap.free_list and m.swap._free.pop(), "neither free nor held: leaked"),
    ],
)
def test_the_audit_finds_what_was_spoiled(spoil: object, found: str) -> None:
    house = House(slots=4)
    spoil(house.memory)  # type: ignore[operator]
    assert any(found in line for line in house.memory.audit()), house.memory.audit()


def furnished() -> House:
    """Pages that are mapped, shared by two tenants, cached alone, in swap with Sequences, clean, and in swap alone."""
    house = House(frames=12, slots=12)
    prefix = tokens(2 * P, 1)
    house.start([*prefix, *tokens(P + 1, 2)], tenant="a")
    house.start([*prefix, 5], tenant="b")
    house.run(tokens(3 * P + 1, 3))
    guest = house.start(tokens(P + 1, 4))
    house.finish(house.memory.swap_out([guest.space]))
    house.start(tokens(2 * P, 6))
    assert house.memory.audit() == []
    return house


def a_cached_frame(m: MemoryManager) -> int:
    return int(np.flatnonzero(m.cache.entries_of_frames >= 0)[0])


def an_entry(m: MemoryManager) -> int:
    return int(np.flatnonzero(m.cache.in_use())[0])


def a_used_slot(m: MemoryManager) -> int:
    return int(np.flatnonzero(np.asarray(m.swap.references))[0])


def a_listed_page(m: MemoryManager) -> int:
    return int(np.flatnonzero(np.asarray(m.lru.lists.on) >= 0)[0])


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda m: m.swap.references.__setitem__(a_used_slot(m), 7), "7 references, 1 holders"),
        (lambda m: m.swap.slots_of_frames.__setitem__(11, 2), "frame 11: its slot 2 does not name it"),
        (lambda m: m.swap.twin.__setitem__(11, 5), "slot 11: its twin, frame 5, names slot -1"),
        (lambda m: m.swap.entry.__setitem__(11, an_entry(m)), "names slot -1"),
        (lambda m: m.cache.entries_of_frames.__setitem__(a_cached_frame(m), -1), "names entry -1"),
        (lambda m: m.cache.frames.__setitem__(an_entry(m), -1), "is nowhere"),
        (lambda m: m.cache.keys.__setitem__(an_entry(m), b"?"), "is not in the index under its key"),
        (lambda m: m.cache.content.__setitem__(an_entry(m), b"?"), "has 1 bytes of content"),
        (lambda m: m.cache.index.__setitem__(b"?", an_entry(m)), "in the index"),
        (lambda m: m.cache._newer.__setitem__(an_entry(m), an_entry(m)), "newer sibling 0, should be"),
        (lambda m: m.cache._first_of_root.clear(), "stands 0 times among children, should 1 times"),
        (lambda m: m.lru.lists.on.__setitem__(a_listed_page(m), 1), "and is marked 1"),
        (lambda m: m.lru.lists.remove(a_listed_page(m)), "stands on -1"),
        (lambda m: m.lru.actives.__setitem__(a_listed_page(m), ~m.lru.actives[a_listed_page(m)]), "active pages"),
        (lambda m: m.tenants.foreign.clear(), "foreign references are {}, counted {"),
        (lambda m: m.tenants.has_foreign.__setitem__(7, True), "frames marked foreign are"),
    ],
)
def test_the_audit_finds_what_was_spoiled_among_many(spoil: object, found: str) -> None:
    house = furnished()
    spoil(house.memory)  # type: ignore[operator]
    assert any(found in line for line in house.memory.audit()), house.memory.audit()


def test_a_frame_that_is_charged_to_who_does_not_map_it() -> None:
    house = furnished()
    shared = next(iter(house.memory.tenants.foreign))
    house.memory.tenants.of_frame[shared] = house.memory.tenants.id("default")
    assert any("who does not map it" in line for line in house.memory.audit())


def test_an_audit_stops_on_its_way_however_much_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an engine can let others in: after each 8 entries here, in every part that goes through all."""
    monkeypatch.setattr("mm.audit.ENTRIES_AT_ONCE", 8)
    house = House(frames=400, pages=64)
    fewer = sum(found is None for found in house.memory.auditing())
    for seed in range(10):
        house.run(tokens(32 * P + 1, seed))
    assert len(house.memory.cache) == 320
    assert sum(found is None for found in house.memory.auditing()) >= fewer + 4 * 320 // 8
