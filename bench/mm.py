"""Times memory and the scheduler alone: the host's part of a step, look-ups, forks, swaps; what is saved. No device.

    make bench-mm            or  python -m bench.mm [--runs 7] [--skip-peer]

Every time is the median over runs of the median within a run, in microseconds on one core. Beside them, in the same
process and turn about, the bookkeeping of transformers' continuous batching cache on the same Sequences.

    step      grow every running Sequence by one token: page edges, allocation, copy-on-write check, orders
    publish   at commit, put the pages that became full into the prefix cache (overlaps with the device): a sixteenth of
              the Sequences fill one in a step; publish_256_pages: 256 of them do at once
    turn      the scheduler's part of a steady decode step: schedule and commit, grow and publish included
    admit     a Sequence with a prompt of 5 pages enters: look-up, address space, row, its part of the plan
    release   a Sequence of 15 pages ends: its cached pages rest, the others are free
    peer      the same for transformers: room for one token each, the block tables that its kernels read, the hashes of
              pages that became full; peer_alloc is the first of the three alone

The last line printed is one JSON object.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np

from bench import workload
from bench.simulate import Replay, replay
from mm import AddressSpace, MemoryManager
from mm.lru import PageLru
from model.step_plan import SamplingParameters, StepPlan, StepResult
from service.engine_client import Submit
from service.request import Sequence
from service.scheduler import Scheduler, SchedulerSettings

VOCABULARY = 32_000
STEPS = 200


def timed(action: Callable[[], object]) -> float:
    """Microseconds of one call."""
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e6


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


# --- ours


class Batch:
    """`count` Sequences with the prompts of chat-1000, computed; each step gives every one a token."""

    def __init__(self, count: int, frames: int) -> None:
        items = workload.load("chat-1000", VOCABULARY)
        self.memory = MemoryManager(frames=frames, max_rows=count, max_pages=256, slots=4_096)
        self.ids = np.random.default_rng(0).integers(0, VOCABULARY, (count, 4_096), dtype=np.int32)
        for number in range(count):
            prompt = np.array(items[number % len(items)].prompt_ids, np.int32)
            prompt[0] = number  # no two are equal
            admit(self.memory, self.ids, prompt)
        self.rows = np.arange(count, dtype=np.int32)
        self.ones = np.ones(count, np.int32)

    def publish(self) -> None:
        self.memory.publish(self.rows, self.memory.tables.lengths[self.rows], self.ids)

    def steps(self) -> tuple[float, float]:
        """Median microseconds of a step, and of its commit."""
        grow, publish = [], []
        for _ in range(STEPS):
            grow.append(timed(lambda: self.memory.grow(self.rows, self.ones)))
            publish.append(timed(self.publish))
        return median(grow), median(publish)


def step_times(count: int, frames: int, runs: int) -> tuple[float, float]:
    """Medians over runs; each run in a fresh manager, so that lengths are the same."""
    times = [Batch(count, frames).steps() for _ in range(runs)]
    return median(grow for grow, _ in times), median(publish for _, publish in times)


def admit(memory: MemoryManager, ids: np.ndarray, tokens: np.ndarray) -> AddressSpace:
    """A Sequence that has computed and published `tokens`; `ids` is by row."""
    space = memory.create("bench", match=memory.lookup(memory.chain(tokens)))
    ids[space.row, : len(tokens)] = tokens
    space.grow(len(tokens) - space.length)
    memory.publish(np.array([space.row], np.int32), np.array([len(tokens)], np.int32), ids)
    return space


def page_times(runs: int) -> dict[str, float]:
    """Look-up, fork and swap of a Sequence of 100 pages, and the eviction of a cached page."""
    draw = np.random.default_rng(1)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(runs):
        memory = MemoryManager(frames=100_000, max_rows=64, max_pages=256, slots=4_096)
        ids = np.zeros((64, 4_096), np.int32)
        prompt = draw.integers(0, VOCABULARY, 1_601, dtype=np.int32)
        space = admit(memory, ids, prompt[:1_600])
        for _ in range(50):
            found["lookup"].append(timed(lambda: memory.lookup(memory.chain(prompt))) / 100)  # noqa: B023
            began = time.perf_counter()
            child, _ = space.fork("child")
            found["fork"].append((time.perf_counter() - began) * 1e6)
            child.release()
        for victim in [admit(memory, ids, draw.integers(0, VOCABULARY, 1_600, dtype=np.int32)) for _ in range(20)]:
            began = time.perf_counter()
            orders = memory.swap_out([victim])
            found["swap_out"].append((time.perf_counter() - began) * 1e6 / len(orders))
            found["complete"].append(timed(lambda: memory.complete(orders.ticket)) / len(orders))  # noqa: B023
            began = time.perf_counter()
            orders = memory.swap_in(victim)
            found["swap_in"].append((time.perf_counter() - began) * 1e6 / len(orders))
            memory.complete(orders.ticket)
            victim.release()
        found["evict"].append(evict_time(draw))
    return {name: median(values) for name, values in found.items()}


def evict_time(draw: np.random.Generator) -> float:
    """Microseconds a page of an allocation that has to reclaim 1,000 idle cached pages of a full pool."""
    memory = MemoryManager(frames=2_000, max_rows=16, max_pages=2_000)
    ids = np.zeros((16, 32_000), np.int32)
    for _ in range(8):
        admit(memory, ids, draw.integers(0, VOCABULARY, 4_000, dtype=np.int32)).release()
    space = memory.create("needs room")
    return timed(lambda: space.grow(16_000)) / 1_000


def hot_prefix_hit_pct(*, plain_lru: bool) -> float:
    """A shared prefix of 64 pages is asked for after every 9 one-time prompts, 10 pools of these in all."""
    original = PageLru.used
    if plain_lru:
        PageLru.used = PageLru.remove  # type: ignore[method-assign]  # one list, in order of use: nothing is preferred
    try:
        draw = np.random.default_rng(2)
        memory = MemoryManager(frames=1_024, max_rows=4, max_pages=128)
        ids = np.zeros((4, 2_048), np.int32)
        hot = draw.integers(0, VOCABULARY, 1_025, dtype=np.int32)
        asked = found = 0

        for _ in range(2):
            admit(memory, ids, hot).release()
        for number in range(10 * 1_024 // 120):
            admit(memory, ids, draw.integers(0, VOCABULARY, 1_920, dtype=np.int32)).release()
            if number % 9 == 8:
                asked += 1_024
                found += memory.lookup(memory.chain(hot)).cached_tokens
                admit(memory, ids, hot).release()
        return round(100 * found / asked, 2)
    finally:
        PageLru.used = original  # type: ignore[method-assign]


# --- the scheduler on top


def scheduler_of(count: int) -> Scheduler:
    memory = MemoryManager(frames=100_000, max_rows=count, max_pages=256)
    return Scheduler(memory, SchedulerSettings(max_running=count, max_batched_tokens=100_000, max_length=4_096))


def result_of(plan: StepPlan, draw: np.random.Generator) -> StepResult:
    tokens = np.where(plan.samples, draw.integers(0, VOCABULARY, len(plan.rows)), -1)
    return StepResult(tokens.astype(np.int32), np.zeros(len(plan.rows), np.bool_))


def submit(scheduler: Scheduler, numbers: range, draw: np.random.Generator) -> None:
    """Prompts of 5 pages, with 10 more to generate."""
    greedy = SamplingParameters(temperature=0.0)
    for number in numbers:
        prompt = draw.integers(0, VOCABULARY, 80).tolist()
        scheduler.add(Sequence.from_submit(Submit(number, str(number), prompt, 160, greedy, []), 0, 0.0))


def run_step(scheduler: Scheduler, draw: np.random.Generator) -> float:
    """Microseconds of the scheduler's part of a step; the executor is left out."""
    began = time.perf_counter()
    plan = scheduler.schedule(1.0)
    scheduled_us = (time.perf_counter() - began) * 1e6
    assert plan is not None
    result = result_of(plan, draw)
    return scheduled_us + timed(lambda: scheduler.commit(result, 1.0))


def turn_time(count: int) -> float:
    """Median microseconds of a steady step of `count` Sequences, of which a sixteenth fills a page."""
    draw, scheduler = np.random.default_rng(3), scheduler_of(count)
    for first in range(0, count, count // 16):
        submit(scheduler, range(first, first + count // 16), draw)
        run_step(scheduler, draw)
    return median(run_step(scheduler, draw) for _ in range(100))


def come_and_go_times() -> tuple[float, float]:
    """Median microseconds of one admission of 5 pages, of 8 in a step, and of one end at 15 pages."""
    draw, scheduler = np.random.default_rng(3), scheduler_of(64)
    memory, running = scheduler.memory, scheduler.sequences.running
    admit, release = [], []
    for turn in range(50):
        submit(scheduler, range(8 * turn, 8 * turn + 8), draw)
        began = time.perf_counter()
        plan = scheduler.schedule(1.0)
        admit.append((time.perf_counter() - began) * 1e6 / 8)
        assert plan is not None
        scheduler.commit(result_of(plan, draw), 1.0)
        memory.grow(plan.rows, np.full(8, 159, np.int32))
        memory.publish(plan.rows, np.full(8, 239, np.int32), scheduler.sequences.rows.tokens)
        release += [timed(lambda: scheduler.end(each, "abort", 2.0)) for each in list(running.values())]  # noqa: B023
    return median(admit), median(release)


def publish_pages_time() -> float:
    """Median microseconds in which 256 Sequences publish a page each."""
    batch = Batch(256, 100_000)
    lengths = batch.memory.tables.lengths[batch.rows]
    batch.memory.grow(batch.rows, (16 - lengths % 16).astype(np.int32))
    batch.publish()
    times = []
    for _ in range(10):
        batch.memory.grow(batch.rows, np.full(256, 16, np.int32))
        times.append(timed(batch.publish))
    return median(times)


# --- the peer


class Peer:
    """transformers' paged cache, with 256 Sequences of the same lengths."""

    def __init__(self, count: int) -> None:
        import torch
        from transformers import LlamaConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.cache import PagedAttentionCache
        from transformers.generation.continuous_batching.distributed import DistributedHelper
        from transformers.generation.continuous_batching.requests import RequestState

        # The smallest model there is: the tensors themselves are not what is measured.
        model = LlamaConfig(
            hidden_size=8,
            num_attention_heads=1,
            num_key_value_heads=1,
            num_hidden_layers=1,
            intermediate_size=8,
            vocab_size=VOCABULARY,
            head_dim=8,
        )
        model._attn_implementation = "paged|sdpa"
        settings = ContinuousBatchingConfig(
            page_size=16, num_blocks=20_000, max_batch_tokens=1_024, max_blocks_per_request=256, max_memory_percent=0.9
        )
        helper = DistributedHelper(None, None)
        self.cache = PagedAttentionCache(model, settings, "cpu", helper, dtype=torch.float32)
        self.tables = torch.zeros((1, count, 256), dtype=torch.int32)
        self.states = []
        self.draw = np.random.default_rng(0)
        for number, item in enumerate(workload.load("chat-1000", VOCABULARY, count)):
            state = RequestState(str(number), item.prompt_ids, max_new_tokens=None)
            full = self.cache.count_new_complete_blocks(state, len(item.prompt_ids))
            assert self.cache.can_store_request_tokens(state, len(item.prompt_ids))
            state.position_offset = len(item.prompt_ids)
            self.cache.mark_complete_blocks(state, full)
            self.states.append(state)

    def steps(self, count: int) -> tuple[float, float]:
        """Median microseconds of all that it does for a step, and of making room alone."""
        whole, alone = [], []
        for _ in range(count):
            tokens = self.draw.integers(0, VOCABULARY, len(self.states)).tolist()
            began = time.perf_counter()
            full = []
            for state in self.states:
                assert self.cache.can_store_request_tokens(state, 1)
                full.append(self.cache.count_new_complete_blocks(state, 1))
            alone.append((time.perf_counter() - began) * 1e6)
            for number, state in enumerate(self.states):
                self.cache.fill_block_table(state.request_id, state.current_len(), 1, self.tables[:, number])
            for state, blocks, token in zip(self.states, full, tokens, strict=True):
                state.generated_tokens.append(token)
                state.position_offset += 1
                self.cache.mark_complete_blocks(state, blocks)
            whole.append((time.perf_counter() - began) * 1e6)
        return median(whole), median(alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--skip-peer", action="store_true")
    chosen = parser.parse_args()
    result: dict[str, float | None] = {}
    peer = None if chosen.skip_peer else Peer(256)
    ours, theirs = [], []
    for _ in range(chosen.runs):  # turn about, so that a busy neighbour meets both
        ours.append(Batch(256, 100_000).steps())
        if peer is not None:
            theirs.append(peer.steps(10))
    result["step_us_256"] = median(grow for grow, _ in ours)
    result["publish_us_256"] = median(publish for _, publish in ours)
    result["peer_step_us_256"] = median(whole for whole, _ in theirs) if theirs else None
    result["peer_alloc_us_256"] = median(alone for _, alone in theirs) if theirs else None
    result["step_us_1024"], result["publish_us_1024"] = step_times(1_024, 100_000, chosen.runs)
    result["step_us_1024_pool_1m"], _ = step_times(1_024, 1_000_000, chosen.runs)
    result["publish_us_256_pages"] = median(publish_pages_time() for _ in range(chosen.runs))
    result["turn_us_256"] = median(turn_time(256) for _ in range(chosen.runs))
    result["turn_us_1024"] = median(turn_time(1_024) for _ in range(chosen.runs))
    times = [come_and_go_times() for _ in range(chosen.runs)]
    result["admit_us_5_pages"] = median(admit for admit, _ in times)
    result["release_us_15_pages"] = median(release for _, release in times)
    pages = page_times(chosen.runs)
    result["lookup_us_per_page"] = pages["lookup"]
    result["fork_us_100"] = pages["fork"]
    result["swap_decide_us"] = pages["swap_out"]
    result["swap_complete_us_per_page"] = pages["complete"]
    result["swap_in_us_per_page"] = pages["swap_in"]
    result["evict_us_per_page"] = pages["evict"]
    chat: Replay = replay("chat-1000")
    result["waste_pct_chat"] = chat.summary("chat-1000").waste_pct
    result["saved_pct_parallel"] = replay("parallel-n6-200").summary("parallel-n6-200").saved_pct
    result["hot_prefix_hit_pct_scan"] = hot_prefix_hit_pct(plain_lru=False)
    result["hot_prefix_hit_pct_plain_lru"] = hot_prefix_hit_pct(plain_lru=True)
    rounded = {name: value if value is None else round(value, 2) for name, value in result.items()}
    for name, value in rounded.items():
        print(f"{name:30} {value}")
    print(json.dumps(rounded))


if __name__ == "__main__":
    main()
