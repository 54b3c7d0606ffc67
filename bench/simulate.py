"""Replays a workload against the memory manager alone: no model, no device, no clock. What memory does over time.

    python -m bench.simulate [WORKLOAD ...] [--frames N | --pool-share S] [--slots N] [--rows 256] [--no-cache]
                             [--overtakes N] [--plot FILE.png]

Without WORKLOAD: chat-1000, shared-prefix-512, parallel-n6-200. many-prefixes-400: 16 system prompts, random order.

All requests come at once and run as a server would run them: decodes first, then prefill chunks under a token budget,
admission while there is room, preemption when there is none, swaps that take a step. Per step this prints how much of
what is held is wasted, what sharing saves, what the prefix cache finds and what goes through swap; and beside it what
the same running set would occupy if memory were given out in one piece:

    contiguous    the largest request's length, for everybody
    buddy         the power of two above the length that the request will have, as if that were known

`beam` replays a workload's prompts with beam search on made-up scores: who survives is drawn, the sharing is real.
The last line is one JSON object.
"""

import argparse
import json
from collections import deque
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from bench import workload
from mm import Action, AddressSpace, Candidates, MemoryManager, OutOfFrames, OutOfSwapSlots, SwapOrders, pages_for
from service.cache_order import FRESH_STEPS, WINDOW, overtake, preferred

VOCABULARY = 32_000
DEFAULT = ["chat-1000", "shared-prefix-512", "parallel-n6-200"]


@dataclass
class Timeline:
    """One entry per step."""

    tokens: list[int] = field(default_factory=list)  # positions held, shared ones counted once for each holder
    unused: list[int] = field(default_factory=list)  # positions of mapped pages that hold nothing
    references: list[int] = field(default_factory=list)  # pages mapped, shared ones counted once for each holder
    frames: list[int] = field(default_factory=list)  # mapped by anybody
    cached: list[int] = field(default_factory=list)  # idle
    running: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)  # pages copied out or in so far
    contiguous: list[int] = field(default_factory=list)  # positions that each scheme would reserve
    buddy: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """A replay in numbers. Shares of time-weighted sums."""

    workload: str
    steps: int
    frames: int
    peak_frames: int
    waste_pct: float  # positions of mapped pages that hold nothing
    saved_pct: float  # pages that need no frame because others hold it
    hit_pct: float  # prompt tokens served from the prefix cache
    evictions: int
    refaults: int
    preemptions: int
    swap_out_pages: int
    swap_in_pages: int
    computed_again_pct: float  # tokens computed a second time, of all that had to be computed once
    used_of_contiguous_pct: float  # positions in use, of those that the scheme would reserve
    used_of_buddy_pct: float
    used_of_paged_pct: float  # 100 - waste


@dataclass(eq=False)
class Run:
    """One Sequence: its tokens are known from the beginning, since nobody computes them here."""

    arrival: int
    tokens: np.ndarray  # prompt and output
    prompt: int
    forks: int
    space: AddressSpace | None = None
    preemptions: int = 0
    overtaken: int = 0
    cached_share: float = 0.0
    needed_frames: int = 0
    share_known: int = -FRESH_STEPS - 1


class Replay:
    """Continuous batching over mm."""

    def __init__(
        self,
        items: list[workload.Item],
        *,
        frames: int,
        slots: int = 0,
        rows: int = 256,
        budget: int = 2_048,
        use_cache: bool = True,
        most_overtaken: int = 0,
    ) -> None:
        self.longest = max(len(item.prompt_ids) + item.output_len for item in items)
        self.memory = MemoryManager(frames=frames, max_rows=rows, max_pages=pages_for(self.longest, 16), slots=slots)
        self.budget = budget
        self.use_cache = use_cache
        self.most_overtaken = most_overtaken
        self.timeline = Timeline()
        self.step = 0
        self.computed = 0
        self.arrivals = len(items)
        self.waiting = deque(self._run_of(number, item) for number, item in enumerate(items))
        self.to_compute = sum(len(run.tokens) for run in self.waiting)
        self.moving: list[SwapOrders] = []
        # By row, for those that run; a row that nobody has holds nothing to compute.
        self.ids = np.zeros((rows, self.longest), np.int32)
        self.total = np.zeros(rows, np.int32)
        self.arrival = np.zeros(rows, np.int64)
        self.runs: list[Run | None] = [None] * rows
        self.buddy_of_row = np.zeros(rows, np.int64)

    @staticmethod
    def _run_of(number: int, item: workload.Item) -> Run:
        output = np.random.default_rng(number).integers(0, VOCABULARY, item.output_len, dtype=np.int32)
        tokens = np.concatenate((np.array(item.prompt_ids, np.int32), output))
        return Run(number, tokens, len(item.prompt_ids), item.n - 1)

    def run(self) -> None:
        while self.waiting or self.total.any():
            self._turn()

    def _turn(self) -> None:
        memory = self.memory
        self.step += 1
        memory.turn(float(self.step), self.step)
        for orders in self.moving:
            memory.complete(orders.ticket)
        self.moving = []
        self._move(memory.background_reclaim())
        self._bring_back()
        self._admit()
        rows, counts = self._choose()
        if not len(rows):
            assert self.moving, "nothing runs and nothing is on its way"
            return
        memory.grow(rows, counts)
        self.computed += int(counts.sum())
        lengths = memory.tables.lengths[rows]
        memory.publish(rows, lengths, self.ids)
        self._sample()
        for row in rows[lengths == self.total[rows]].tolist():
            self._leave(row).release()
        for row in rows[counts > 1].tolist():
            self._fork(row)

    def _move(self, orders: SwapOrders) -> None:
        if len(orders):
            self.moving.append(orders)

    # --- who runs

    def _enter(self, run: Run, space: AddressSpace) -> None:
        row = space.row
        run.space = space
        self.ids[row, : len(run.tokens)] = run.tokens
        self.total[row] = len(run.tokens)
        self.arrival[row] = run.arrival
        self.buddy_of_row[row] = 1 << (len(run.tokens) - 1).bit_length()
        self.runs[row] = run

    def _leave(self, row: int) -> AddressSpace:
        run = self.runs[row]
        assert run is not None
        assert run.space is not None
        space, run.space, self.runs[row] = run.space, None, None
        self.total[row] = self.buddy_of_row[row] = 0
        return space

    def _admit(self) -> None:
        memory = self.memory
        while self.waiting and not memory.tables.barred.any():
            place = self._next()
            run = self.waiting[place]
            promised_rows = sum(other.forks for other in self.runs if other is not None)
            if memory.tables.free_rows - promised_rows < 1 + run.forks:
                return
            match = None
            needed = pages_for(run.prompt, 16)
            if self.use_cache:
                match = memory.lookup(memory.chain(run.tokens[: run.prompt]))
                if match.awaited is not None and memory.is_being_written(match.awaited):
                    return
                needed = match.frames_for(run.prompt, 16) + match.idle_frames
            running = int(np.count_nonzero(self.total))
            if needed + running * (1 + run.forks) > memory.available_frames and running:
                return
            overtake(list(islice(self.waiting, place)))
            del self.waiting[place]
            self._enter(run, memory.create(f"request {run.arrival}", match=match, max_tokens=len(run.tokens)))

    def _next(self) -> int:
        """The place in the queue of whom to admit: while frames are short, by what is cached, as in a server."""
        memory, first = self.memory, self.waiting[0]
        if not self.most_overtaken or pages_for(first.prompt, 16) <= memory.free_frames:
            return 0

        free = memory.available_frames - int(np.count_nonzero(self.total))

        def share_of(run: Run) -> float:
            if run.preemptions or run.forks:
                return -1.0
            if self.step - run.share_known > FRESH_STEPS:
                match = memory.lookup(memory.chain(run.tokens[: run.prompt]))
                run.cached_share = match.cached_tokens / run.prompt
                run.needed_frames = match.frames_for(run.prompt, 16) + match.idle_frames
                run.share_known = self.step
            return run.cached_share if run is first or run.needed_frames <= free else -1.0

        return preferred(list(islice(self.waiting, WINDOW)), 0, share_of, self.most_overtaken)

    def _fork(self, row: int) -> None:
        """The prompt is computed: its other continuations begin."""
        run = self.runs[row]
        if run is None or not run.forks or self.memory.tables.lengths[row] < run.prompt:
            return
        while run.forks:
            assert run.space is not None
            run.forks -= 1
            self.arrivals += 1
            tokens = run.tokens.copy()
            output = np.random.default_rng(self.arrivals).integers(0, VOCABULARY, len(tokens), dtype=np.int32)
            tokens[run.prompt :] = output[run.prompt :]
            space, _ = run.space.fork(f"request {run.arrival} fork {run.forks}")
            self._enter(Run(run.arrival, tokens, run.prompt, 0), space)
            self.to_compute += len(tokens) - run.prompt

    def _choose(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows, counts) of this step: decodes, then prompts in order of arrival, as many as find room."""
        tables = self.memory.tables
        left = self.total - tables.lengths
        prompts = np.array([run.prompt if run else 0 for run in self.runs], np.int32)
        ready = (left > 0) & (tables.barred == 0)
        decoding = (ready & (tables.lengths >= prompts)).nonzero()[0]
        prefilling = (ready & (tables.lengths < prompts)).nonzero()[0]
        rows, counts, budget = decoding.tolist(), [1] * len(decoding), self.budget - len(decoding)
        for row in prefilling[np.argsort(self.arrival[prefilling], kind="stable")].tolist():
            count = min(int(prompts[row] - tables.lengths[row]), budget)
            if count > 0:
                rows.append(row)
                counts.append(count)
                budget -= count
        while rows:
            chosen, sizes = np.array(rows, np.int32), np.array(counts, np.int32)
            shortage = self.memory.shortage(chosen, sizes)
            if shortage is None:
                return chosen, sizes
            if not self.memory.arriving_frames and self._preempt(shortage.needed):
                kept = [i for i, row in enumerate(rows) if self.runs[row] is not None and not tables.barred[row]]
                rows, counts = [rows[i] for i in kept], [counts[i] for i in kept]
            else:
                youngest = max(range(len(rows)), key=lambda i: self.arrival[rows[i]])
                del rows[youngest], counts[youngest]
        return np.zeros(0, np.int32), np.zeros(0, np.int32)

    # --- when there is no room

    def _by_age(self) -> np.ndarray:
        rows = self.total.nonzero()[0]
        return rows[np.argsort(self.arrival[rows], kind="stable")].astype(np.int32)

    def _preempt(self, needed: int) -> bool:
        """Take the frames of one, or of a family; never of the oldest. False if nobody frees any."""
        rows = self._by_age()[1:]
        count = np.array([self._at(row).preemptions for row in rows.tolist()], np.int32)
        progress = self.memory.tables.lengths[rows] / np.maximum(1, self.total[rows])
        victim = self.memory.choose_victim(Candidates(rows, np.zeros(len(rows), np.int32), progress, count), needed)
        if victim is None:
            return False
        runs = [self._at(row) for row in victim.rows.tolist()]
        for run in runs:
            run.preemptions += 1
        if victim.action is Action.SWAP:
            try:
                self._move(self.memory.swap_out([run.space for run in runs if run.space]))
            except OutOfSwapSlots:
                pass
            else:
                return True
        for run in runs:
            assert run.space is not None
            run.prompt = max(run.prompt, run.space.length)
            self._leave(run.space.row).release()
            self.waiting.appendleft(run)
        return True

    def _at(self, row: int) -> Run:
        run = self.runs[row]
        assert run is not None
        return run

    def _bring_back(self) -> None:
        """Those in swap, the oldest first; a younger one leaves a frame to each that runs."""
        tables = self.memory.tables
        for age, row in enumerate(self._by_age().tolist()):
            space = self._at(row).space
            if not tables.barred[row] or space is None:
                continue
            headroom = int(np.count_nonzero(self.total)) if age else 0
            if self.memory.swapper.frames_to_swap_in(row) + headroom > self.memory.available_frames and age:
                return
            try:
                self._move(self.memory.swap_in(space))
            except OutOfFrames as error:
                if age == 0 and not self.memory.arriving_frames:
                    self._preempt(error.needed)
                return

    # --- what is seen

    def _sample(self) -> None:
        memory, line = self.memory, self.timeline
        rows = self.total.nonzero()[0].astype(np.int32)
        lengths = memory.tables.lengths[rows]
        tokens, pages = int(lengths.sum()), int(memory.tables.pages(rows).sum())
        line.tokens.append(tokens)
        line.unused.append(pages * 16 - tokens)
        line.references.append(int(memory.frames.references.sum()))
        line.frames.append(int(np.count_nonzero(memory.frames.references)))
        line.cached.append(memory.lru.idle_pages)
        line.running.append(len(rows))
        line.swapped.append(memory.swapper.swapped_out + memory.swapper.swapped_in)
        line.contiguous.append(len(rows) * self.longest)
        line.buddy.append(int(self.buddy_of_row.sum()))

    def summary(self, name: str) -> Summary:
        line, counters = self.timeline, self.memory.counters()
        tokens, pages = sum(line.tokens), sum(line.tokens) + sum(line.unused)
        return Summary(
            workload=name,
            steps=self.step,
            frames=self.memory.frames.total,
            peak_frames=max(line.frames),
            waste_pct=_percent(sum(line.unused), pages),
            saved_pct=_percent(sum(line.references) - sum(line.frames), sum(line.references)),
            hit_pct=_percent(counters.prefix_hit, counters.prefix_query),
            evictions=counters.evict,
            refaults=counters.refault,
            preemptions=counters.preempt_swap + counters.preempt_recompute,
            swap_out_pages=counters.swap_out,
            swap_in_pages=counters.swap_in,
            computed_again_pct=_percent(self.computed + counters.prefix_hit - self.to_compute, self.to_compute),
            used_of_contiguous_pct=_percent(tokens, sum(line.contiguous)),
            used_of_buddy_pct=_percent(tokens, sum(line.buddy)),
            used_of_paged_pct=_percent(tokens, pages),
        )


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 3) if whole else 0.0


def replay(name: str, *, limit: int | None = None, pool_share: float = 1.0, frames: int = 0, **more: int) -> Replay:
    """One workload; the pool is `frames`, or `pool_share` of what the largest Sequences need at their full length."""
    items = workload.load(name, VOCABULARY, limit)
    if not frames:
        pages = (pages_for(len(item.prompt_ids) + item.output_len, 16) for item in items for _ in range(item.n))
        demand = sorted(pages, reverse=True)[: more.get("rows", 256)]
        frames = max(demand[0] + 1, int(pool_share * sum(demand)))
    done = Replay(items, frames=frames, **more)  # type: ignore[arg-type]
    done.run()
    done.memory.check_invariants()
    return done


def beam(name: str, width: int, limit: int) -> float:
    """The share of pages that need no frame, over the time of a beam search of `width` on the prompts of a workload."""
    items, draw = workload.load(name, VOCABULARY, limit), np.random.default_rng(0)
    saved = mapped = 0
    for item in items:
        length = len(item.prompt_ids) + item.output_len
        frames = width * pages_for(length, 16) + width
        memory = MemoryManager(frames=frames, max_rows=2 * width, max_pages=pages_for(length, 16))
        first = memory.create("beam")
        first.grow(len(item.prompt_ids))
        beams = [first, *(first.fork("beam")[0] for _ in range(width - 1))]
        scores = np.full(width, -np.inf)
        scores[0] = 0.0  # all are equal at first: one of them is extended in `width` ways
        for _ in range(item.output_len):
            parents, scores = _next_beams(scores, width, draw)
            survivors = [beams[parent].fork("beam")[0] for parent in parents]
            for old in beams:
                old.release()
            beams = survivors
            memory.grow(np.array([space.row for space in beams], np.int32), np.ones(width, np.int32))
            references = int(memory.frames.references.sum())
            saved += references - int(np.count_nonzero(memory.frames.references))
            mapped += references
        memory.check_invariants()
    return _percent(saved, mapped)


def _next_beams(scores: np.ndarray, width: int, draw: np.random.Generator) -> tuple[list[int], np.ndarray]:
    """Made-up log-probabilities of the 2 x width likeliest tokens of each beam, and the beams that come out best."""
    sharpness = draw.gamma(2.0, 1.0, (width, 1))  # some next tokens are clear, some are not
    logits = -sharpness * np.log(np.arange(1, 2 * width + 1))
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    totals = (scores[:, None] + log_probabilities).reshape(-1)
    best = np.argsort(-totals, kind="stable")[:width]
    return (best // (2 * width)).tolist(), totals[best]


def plot(replays: dict[str, Replay], path: Path) -> None:
    """Draw frames in use and idle over time, and what the other schemes would reserve."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(replays), 1, figsize=(9, 3.2 * len(replays)), squeeze=False)
    for axis, (name, done) in zip(axes[:, 0], replays.items(), strict=True):
        line = done.timeline
        steps = np.arange(len(line.tokens))
        axis.plot(steps, np.array(line.contiguous) / 16, label="contiguous, largest length", color="tab:red")
        axis.plot(steps, np.array(line.buddy) / 16, label="buddy, power of two", color="tab:orange")
        axis.plot(steps, line.references, label="pages mapped", color="tab:gray", linestyle=":")
        axis.plot(steps, line.frames, label="frames in use", color="tab:blue")
        axis.plot(steps, np.array(line.frames) + line.cached, label="... and cached", color="tab:blue", alpha=0.4)
        axis.axhline(done.memory.frames.total, color="black", linewidth=0.5)
        axis.set(title=name, xlabel="step", ylabel="frames", ylim=(0, 2 * max(line.references) + 1))
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=DEFAULT)
    parser.add_argument("--limit", type=int, help="first rows only")
    parser.add_argument("--frames", type=int, default=0, help="size of the pool")
    parser.add_argument("--pool-share", type=float, default=1.0, help="size of the pool, as a share of the demand")
    parser.add_argument("--slots", type=int, default=0, help="swap slots")
    parser.add_argument("--rows", type=int, default=256, help="Sequences that run at once")
    parser.add_argument("--overtakes", type=int, default=0, help="how often one may be overtaken by cached prompts")
    parser.add_argument("--no-cache", action="store_true", help="without the prefix cache")
    parser.add_argument("--beam", type=int, default=0, metavar="WIDTH", help="beam search on 40 rows of each workload")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture (needs matplotlib)")
    chosen = parser.parse_args()
    replays = {}
    results: list[dict[str, object]] = []
    for name in chosen.workloads:
        if chosen.beam:
            results.append({"workload": name, "beam": chosen.beam, "saved_pct": beam(name, chosen.beam, 40)})
            print(results[-1])
            continue
        more = {
            "slots": chosen.slots,
            "rows": chosen.rows,
            "use_cache": not chosen.no_cache,
            "most_overtaken": chosen.overtakes,
        }
        done = replay(name, limit=chosen.limit, pool_share=chosen.pool_share, frames=chosen.frames, **more)
        replays[name] = done
        results.append(asdict(done.summary(name)))
        for key, value in results[-1].items():
            print(f"{key:24} {value}")
        print()
    if chosen.plot and replays:
        plot(replays, chosen.plot)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
