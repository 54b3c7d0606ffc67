"""A memory manager with a simulated device and mover around it, and the few moves that most tests of mm make.

The frames hold for each token a checksum of it and all that came before (`values`), as real keys and values depend on
the whole beginning: so the right tokens after the wrong beginning are wrong content.
"""

import zlib
from typing import Any

import numpy as np
from simulated_device import SimulatedDevice
from simulated_mover import SimulatedMover

from mm import AddressSpace, MemoryManager, Namespace, PrefixMatch, SwapOrders


def values(adapter: str, tokens: list[int]) -> list[int]:
    """What the frames hold for `tokens`: for each, a checksum of it and all before it."""
    result, value = [], zlib.crc32(adapter.encode())
    for token in tokens:
        value = zlib.crc32(token.to_bytes(4, "little"), value)
        result.append(value)
    return result


class Guest:
    """A Sequence: the tokens it holds, and those of its prompt that it does not hold yet."""

    def __init__(self, space: AddressSpace, match: PrefixMatch | None, prompt: list[int], adapter: str) -> None:
        self.space = space
        self.match = match
        self.adapter = adapter
        self.tokens = prompt[: space.length]
        self.rest = prompt[space.length :]

    @property
    def row(self) -> int:
        return self.space.row

    @property
    def frames(self) -> list[int]:
        return self.space.entries.tolist()


class House:
    """`memory` with small pages; everything that it orders is carried out, swaps when the test says so."""

    def __init__(self, *, frames: int = 32, rows: int = 16, pages: int = 32, page_size: int = 4, **more: Any) -> None:
        self.memory = MemoryManager(frames=frames, max_rows=rows, max_pages=pages, page_size=page_size, **more)
        self.device = SimulatedDevice(self.memory)
        self.mover = SimulatedMover(self.device)
        self.page_size = page_size
        self.ids = np.zeros((rows, pages * page_size), np.int32)
        self.admitted = 0

    # --- the life of a Sequence

    def lookup(self, prompt: list[int], *, salt: str = "", adapter: str = "", tenant: str = "default") -> PrefixMatch:
        chain = self.memory.chain(np.array(prompt, np.int32), Namespace(adapter, salt), tenant)
        return self.memory.lookup(chain)

    def admit(self, prompt: list[int], *, salt: str = "", adapter: str = "", tenant: str = "default") -> Guest:
        """Look up and create; nothing is computed yet. Pages in swap are brought in."""
        match = self.lookup(prompt, salt=salt, adapter=adapter, tenant=tenant)
        self.admitted += 1
        space = self.memory.create(f"request {self.admitted}", tenant=tenant, match=match)
        guest = Guest(space, match, prompt, adapter)
        self.ids[space.row, : len(prompt)] = prompt
        if not space.is_resident:
            self.finish(self.memory.swap_in(space))
        return guest

    def step(self, guest: Guest, new: list[int], *, is_good: bool = True) -> None:
        """Compute these tokens in one step, and commit it if it is good."""
        start = len(guest.tokens)
        self.device.carry_out(self.memory.grow(np.array([guest.row], np.int32), np.array([len(new)], np.int32)))
        guest.tokens = guest.tokens + new
        self.ids[guest.row, start : len(guest.tokens)] = new
        self.device.write(guest.row, start, values(guest.adapter, guest.tokens)[start:])
        if is_good:
            self.commit(guest)

    def commit(self, guest: Guest) -> None:
        lengths = np.array([len(guest.tokens)], np.int32)
        self.memory.publish(np.array([guest.row], np.int32), lengths, self.ids)

    def prefill(self, guest: Guest, chunk: int = 1_000) -> None:
        """Compute what is left of the prompt, in chunks."""
        while guest.rest:
            part, guest.rest = guest.rest[:chunk], guest.rest[chunk:]
            self.step(guest, part)

    def start(self, prompt: list[int], output: list[int] = [], **more: str) -> Guest:  # noqa: B006  (never changed)
        """A Sequence that has computed its prompt and then `output`, one token a step."""
        guest = self.admit(prompt, **more)
        self.prefill(guest)
        for token in output:
            self.step(guest, [token])
        self.check(guest)
        return guest

    def run(self, prompt: list[int], output: list[int] = [], **more: str) -> PrefixMatch:  # noqa: B006
        """The same, from beginning to end: it is released. Returns what its prompt found in the cache."""
        guest = self.start(prompt, output, **more)
        guest.space.release()
        assert guest.match is not None
        return guest.match

    def fork(self, guest: Guest, length: int | None = None) -> Guest:
        """A child with the first `length` tokens; None: all."""
        space, orders = guest.space.fork("child", length)
        self.device.carry_out(orders)
        child = Guest(space, None, guest.tokens[:length], guest.adapter)
        self.ids[space.row] = self.ids[guest.row]
        return child

    # --- swaps

    def begin(self, orders: SwapOrders) -> SwapOrders:
        self.mover.start(orders)
        return orders

    def finish(self, orders: SwapOrders, *, succeeds: bool = True) -> None:
        """Carry a swap order out, and report it."""
        if len(orders):
            if orders.ticket not in self.mover.in_flight:
                self.mover.start(orders)
            self.mover.end(orders.ticket, succeeds=succeeds)
        self.report()

    def report(self) -> None:
        for ticket, is_complete in self.mover.ended():
            (self.memory.complete if is_complete else self.memory.fail)(ticket)

    # --- what must hold

    def check(self, *guests: Guest) -> None:
        """The books balance, and these Sequences read what they wrote, whatever lies in free frames and slots."""
        self.memory.check_invariants()
        assert self.device.writes_to_shared == 0
        self.device.poison_free_frames()
        self.mover.poison_free_slots()
        for guest in guests:
            assert self.mover.read(guest.row, len(guest.tokens)) == values(guest.adapter, guest.tokens)
