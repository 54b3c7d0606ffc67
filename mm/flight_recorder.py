"""The last events of memory, always recorded: what happened to whose pages, in which step. Like ftrace, and as cheap.

A ring of fixed size in plain arrays; an event is a few array writes, and a step's allocations are written at once.
"""

from enum import IntEnum

import numpy as np

from mm.addresses import FloatArray, Int32Array, Int64Array

CAPACITY = 65_536


class EventKind(IntEnum):
    """What happened, and what `place` and `count` say about it."""

    ALLOCATE = 1  # place: the frame; count: 1
    COPY = 2  # copy-on-write. place: the new frame; count: 1
    SHARE = 3  # cached pages were mapped. place: the first frame, or -1; count: pages
    FORK = 4  # place: the parent's row; count: pages
    RELEASE = 5  # an address space ended. place: its row; count: pages
    DROP = 6  # a clean page's frame was freed. place: the frame; count: 1
    EVICT = 7  # a cached page was lost. place: its frame, or -1; count: 1
    SWAP_OUT = 8  # ordered. place: the ticket; count: pages
    SWAP_IN = 9  # ordered. place: the ticket; count: pages
    COMPLETE = 10  # an order ended. place: the ticket; count: pages
    FAIL = 11  # an order failed. place: the ticket; count: pages
    PREEMPT = 12  # place: the row; count: frames expected from it
    DENY = 13  # an allocation was refused. place: frames free or reclaimable; count: frames asked for
    PIN = 14  # place: the pin; count: pages
    UNPIN = 15  # place: the pin; count: pages
    ACTION = 16  # an operator did something. place: its number; count: 1


class FlightRecorder:
    """The last `capacity` events. `now` and `step` stamp what is recorded; `MemoryManager.turn` sets them."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.recorded = 0  # events since the start
        self.now = 0.0
        self.step = 0
        self._times: FloatArray = np.zeros(capacity, np.float64)
        # step, kind, serial of owner, tenant, place, count
        self._fields: Int64Array = np.zeros((6, capacity), np.int64)
        self._views = [field.data for field in self._fields]

    def record(self, kind: EventKind, serial: int, tenant: int, place: int, count: int) -> None:
        """One event. serial: of the owner's address space, 0 for none."""
        at = self.recorded % self.capacity
        steps, kinds, serials, tenants, places, counts = self._views
        self._times[at] = self.now
        steps[at], kinds[at], serials[at] = self.step, kind, serial
        tenants[at], places[at], counts[at] = tenant, place, count
        self.recorded += 1

    def record_frames(self, kind: EventKind, serials: Int64Array, tenants: Int32Array, frames: Int32Array) -> None:
        """One event of the same kind for each of `frames` (N,), N <= capacity."""
        at, count = self.recorded % self.capacity, len(frames)
        if at + count > self.capacity:  # around the end of the ring, in two parts
            cut = self.capacity - at
            self.record_frames(kind, serials[:cut], tenants[:cut], frames[:cut])
            self.record_frames(kind, serials[cut:], tenants[cut:], frames[cut:])
            return
        ring = slice(at, at + count)
        fields = self._fields
        self._times[ring] = self.now
        fields[0, ring] = self.step
        fields[1, ring] = kind
        fields[2, ring] = serials
        fields[3, ring] = tenants
        fields[4, ring] = frames
        fields[5, ring] = 1
        self.recorded += count

    def find(
        self,
        *,
        after: int = -1,
        kind: EventKind | None = None,
        tenant: int | None = None,
        place: int | None = None,
        serials: Int64Array | None = None,
    ) -> Int64Array:
        """(N,) numbers of the kept events after number `after` that agree with all that is asked for, in order."""
        first = max(0, self.recorded - self.capacity, after + 1)
        numbers = np.arange(first, max(first, self.recorded))
        places = numbers % self.capacity
        agrees = np.ones(len(numbers), np.bool_)
        for field, wanted in ((1, kind), (3, tenant), (4, place)):
            if wanted is not None:
                agrees &= self._fields[field, places] == wanted
        if serials is not None:
            agrees &= np.isin(self._fields[2, places], serials)
        return numbers[agrees]

    def at(self, number: int) -> tuple[float, list[int]]:
        """(time, [step, kind, serial, tenant, place, count]) of a kept event."""
        place = number % self.capacity
        return float(self._times[place]), [view[place] for view in self._views]
