"""A small scheduler over a `House`: enough of one to put load on mm, with outputs that tell when anything is wrong.

Each Sequence's next token is a checksum of all that its frames hold, so one wrong page changes all that follows.
`alone` says what it must produce. Older Sequences are never preempted for younger ones.
"""

import zlib
from dataclasses import dataclass, field
from random import Random

import numpy as np
from memory_house import House, values

from mm import Action, AddressSpace, Candidates, OutOfFrames, OutOfSwapSlots, PrefixMatch


def next_token(content: list[int]) -> int:
    return zlib.crc32(np.array(content, np.int64).tobytes()) % 50


def alone(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(values("", tokens)))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Job:
    """One Sequence, from the queue to its end."""

    name: str
    prompt: list[int]
    count: int  # tokens to generate
    forks: int = 0  # further Sequences that begin when its prompt is computed
    tenant: str = "default"
    tokens: list[int] = field(default_factory=list)  # prompt and output
    space: AddressSpace | None = None
    preemptions: int = 0
    ended_step: int = -1

    @property
    def done(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.count


class Load:
    """Runs jobs to their end, with copies that end in any order and now and then fail."""

    def __init__(
        self, house: House, jobs: list[Job], *, seed: int = 0, failures: float = 0.1, budget: int = 24
    ) -> None:
        self.house = house
        self.memory = house.memory
        self.waiting = list(jobs)
        self.running: list[Job] = []  # oldest first
        self.ended: list[Job] = []
        self.draw = Random(seed)
        self.failures = failures
        self.budget = budget
        self.step = 0
        for job in jobs:
            job.tokens = list(job.prompt)
            job.forks = job.forks

    def run(self, most_steps: int) -> None:
        while self.waiting or self.running:
            assert self.step < most_steps, f"{len(self.waiting)} wait and {len(self.running)} run: no progress"
            self.turn()

    def turn(self) -> None:
        self.step += 1
        self.memory.turn(float(self.step), self.step)
        self.end_copies()
        self.house.mover.start(self.memory.background_reclaim())
        self.bring_back()
        self.admit()
        self.compute()
        waiting = {"default": len(self.waiting) + sum(not self.is_resident(job) for job in self.running)}
        self.memory.report_pressure(waiting, {"default": len(self.running) - waiting["default"] + len(self.waiting)})
        self.house.device.poison_free_frames()
        self.house.mover.poison_free_slots()

    def end_copies(self) -> None:
        for ticket in list(self.house.mover.in_flight):
            if self.draw.random() < 0.6:
                self.house.mover.end(ticket, succeeds=self.draw.random() >= self.failures)
        self.house.report()

    @staticmethod
    def is_resident(job: Job) -> bool:
        return job.space is not None and job.space.is_resident

    def bring_back(self) -> None:
        """Swapped-out Sequences come back before new ones are admitted, the oldest first; for it, others make room.

        A younger one leaves a frame to each that runs, or it would take what was just freed for them, for ever.
        """
        for job in list(self.running):
            if job.space is None or job.space.is_resident:
                continue
            headroom = sum(map(self.is_resident, self.running))
            needed = self.memory.swapper.frames_to_swap_in(job.space.row)
            if job is not self.running[0] and needed + headroom > self.memory.available_frames:
                return
            try:
                self.house.mover.start(self.memory.swap_in(job.space))
            except OutOfFrames as error:
                if job is self.running[0] and not self.memory.arriving_frames:
                    self.preempt(self.running[1:], error.needed)
                return

    def admit(self) -> None:
        while self.waiting and self.memory.tables.free_rows and all(map(self.is_resident, self.running)):
            job = self.waiting[0]
            match = self.memory.lookup(self.memory.chain(np.array(job.tokens, np.int32)))
            if match.awaited is not None and self.memory.is_being_written(match.awaited):
                return
            if self.frames_for(match, job) > self.memory.available_frames:
                match = match.whole_pages(self.house.page_size)
            if self.frames_for(match, job) + len(self.running) > self.memory.available_frames:
                return
            self.waiting.pop(0)
            limit = len(job.prompt) + job.count
            job.space = self.memory.create(job.name, tenant=job.tenant, match=match, max_tokens=limit)
            self.house.ids[job.space.row, : len(job.tokens)] = job.tokens
            self.running.append(job)
            self.running.sort(key=lambda each: int(each.name))

    def frames_for(self, match: PrefixMatch, job: Job) -> int:
        """Frames that are not available any more once this has begun and computed its prompt."""
        return match.idle_frames + match.frames_for(len(job.tokens), self.house.page_size)

    def compute(self) -> None:
        """One step over all that can run: a token each, or a chunk of a prompt."""
        batch: list[tuple[Job, int]] = []
        budget = self.budget
        for job in self.running:
            if self.is_resident(job) and budget > 0:
                assert job.space is not None
                count = min(len(job.tokens) - job.space.length, budget)
                budget -= count
                batch.append((job, count))
        while batch:
            rows = np.array([job.space.row for job, _ in batch if job.space], np.int32)
            counts = np.array([count for _, count in batch], np.int32)
            shortage = self.memory.shortage(rows, counts)
            if shortage is None:
                break
            batch = self.make_room(batch, shortage.needed)
        if not batch:
            return
        self.house.device.carry_out(self.memory.grow(rows, counts))
        for job, count in batch:
            self.advance(job, count)

    def make_room(self, batch: list[tuple[Job, int]], needed: int) -> list[tuple[Job, int]]:
        """Wait for what is on its way; else preempt, never the oldest; else let the youngest sit this step out."""
        if self.memory.arriving_frames:
            return batch[:-1]
        chosen = self.preempt(self.running[1:], needed)  # also those in swap: they may still map frames
        return [(job, count) for job, count in batch if job not in chosen] if chosen else batch[:-1]

    def preempt(self, younger: list[Job], needed: int) -> list[Job]:
        """Take the frames of one of `younger`, or of some that share theirs."""
        rows = np.array([job.space.row for job in younger if job.space], np.int32)
        progress = np.array([(len(job.tokens) - len(job.prompt)) / job.count for job in younger])
        preemptions = np.array([job.preemptions for job in younger], np.int32)
        candidates = Candidates(rows, np.zeros(len(rows), np.int32), progress, preemptions)
        victim = self.memory.choose_victim(candidates, needed) if younger else None
        if victim is None:
            return []
        chosen = [job for job in younger if job.space and job.space.row in victim.rows]
        action = victim.action
        if action is Action.SWAP:
            try:
                self.house.mover.start(self.memory.swap_out([job.space for job in chosen if job.space]))
            except OutOfSwapSlots:
                action = Action.RECOMPUTE
        for job in chosen:
            assert job is not self.running[0]
            job.preemptions += 1
            if action is Action.RECOMPUTE:
                assert job.space is not None
                job.space.release()
                job.space = None
                self.running.remove(job)
                self.waiting.insert(0, job)
        self.waiting.sort(key=lambda job: (job.preemptions == 0, int(job.name)))
        return chosen

    def advance(self, job: Job, count: int) -> None:
        assert job.space is not None
        row, length = job.space.row, job.space.length
        content = values("", job.tokens[:length])
        self.house.device.write(row, length - count, content[length - count :])
        self.memory.publish(np.array([row], np.int32), np.array([length], np.int32), self.house.ids)
        if length < len(job.tokens):
            return
        for _ in range(job.forks):
            self.fork(job)
        job.forks = 0
        job.tokens.append(next_token(self.house.device.read(row, length)))
        self.house.ids[row, length] = job.tokens[-1]
        if job.done:
            job.space.release()
            job.space = None
            job.ended_step = self.step
            self.running.remove(job)
            self.ended.append(job)

    def fork(self, job: Job) -> None:
        """Another continuation. (Greedy, so it must come out the same; its pages are its own all the same.)"""
        assert job.space is not None
        if not self.memory.tables.free_rows:
            return
        child = Job(
            str(int(job.name) + 10_000 * (1 + len(self.running))), job.prompt, job.count, tokens=list(job.tokens)
        )
        child.space, orders = job.space.fork(child.name)
        self.house.device.carry_out(orders)
        self.house.ids[child.space.row] = self.house.ids[job.space.row]
        child.tokens.append(next_token(self.house.device.read(child.space.row, child.space.length)))
        self.house.ids[child.space.row, child.space.length] = child.tokens[-1]
        self.running.append(child)
