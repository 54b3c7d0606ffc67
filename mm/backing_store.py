"""The host memory behind the swap slots: page-locked where a GPU copies to it, else plain. mm's only import of torch.

The memory is taken in chunks, in a thread, and only as far as is asked for (`want`): a server under no pressure locks
next to none. Slots become usable as their chunks come (`ready_slots`). A chunk that the system refuses ends the area
there, with a warning: the area is then smaller than was planned.

To lock memory the driver wants every page of it to be there, and while it locks, its calls from other threads wait:
steps are late by that. Making the pages (finding and zeroing them) is most of the work, so that is done first, without
the driver; and after each chunk there is a pause, since those that wait do not get their turn by themselves
(docs/decisions/0027-swap-memory-is-made-before-it-is-locked.md).
"""

import logging
import mmap
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK_BYTES = 8 << 20
"""Half a millisecond of page-locking."""

PAUSE_S = 0.002
"""After each chunk, for steps that wait for the driver."""

FOR_ALL_CONTEXTS = 1
"""cudaHostRegisterPortable."""

log = logging.getLogger("pagewalk.memory")


class BackingStore:
    """`slots` places of `slot_bytes` each."""

    def __init__(self, slots: int, slot_bytes: int, *, page_locked: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        """slots: at most. Takes no memory yet. chunk_bytes: at least one slot goes into a chunk."""
        self.slots = slots
        self._most = slots
        self.slot_bytes = slot_bytes
        self._page_locked = page_locked
        self._slots_a_chunk = max(1, chunk_bytes // slot_bytes)
        self._chunks: list[Tensor] = []
        self._wanted = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def ready_slots(self) -> int:
        """Slots 0 ... ready_slots - 1 have memory."""
        return min(len(self._chunks) * self._slots_a_chunk, self.slots)

    def want(self, slots: int) -> None:
        """Ask for memory behind the first `slots` slots. Returns at once; what was asked for before stays."""
        if min(slots, self.slots) <= self._wanted or self._is_closed:
            return
        with self._changed:
            self._wanted = min(slots, self.slots)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._allocate, name="backing-store", daemon=True)
            self._thread.start()

    def resize(self, slots: int) -> None:
        """Keep memory for `slots` slots at most, never more than at the start: whole chunks beyond go."""
        with self._changed:
            self.slots = min(slots, self._most)
            self._wanted = min(self._wanted, self.slots)
            del self._chunks[-(-self.slots // self._slots_a_chunk) :]
            self._changed.notify_all()

    def wait(self) -> None:
        """Block until all that was asked for is there, or nothing more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self.ready_slots >= self._wanted or self._is_closed)

    def slot(self, number: int) -> Tensor:
        """(slot_bytes,) uint8: the memory of a ready slot."""
        chunk, place = divmod(number, self._slots_a_chunk)
        return self._chunks[chunk][place * self.slot_bytes : (place + 1) * self.slot_bytes]

    def address(self, number: int) -> int:
        """Where a ready slot begins."""
        chunk, place = divmod(number, self._slots_a_chunk)
        return self._chunks[chunk].data_ptr() + place * self.slot_bytes

    def are_neighbours(self, number: int) -> bool:
        """Whether slot number + 1 begins where slot `number` ends."""
        return (number + 1) % self._slots_a_chunk != 0

    def close(self) -> None:
        """Take no more memory. What is there is given back when nobody uses it any more. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _allocate(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self.ready_slots < self._wanted)
            if self._is_closed:
                return
            self._add_chunk()
            if self._page_locked:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, PAUSE_S)

    def _add_chunk(self) -> None:
        place = len(self._chunks)
        size = min(self._most - place * self._slots_a_chunk, self._slots_a_chunk)
        try:
            chunk = self._take(size * self.slot_bytes)
        except (MemoryError, RuntimeError, OSError) as error:  # torch says the second
            why = (str(error) or "no memory").splitlines()[0]
            log.warning("swap area: %d of %d slots: %s", self.ready_slots, self.slots, why)
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            return
        with self._changed:
            if len(self._chunks) == place and place * self._slots_a_chunk < self.slots:  # else resized meanwhile
                self._chunks.append(chunk)
            self._changed.notify_all()

    def _take(self, size_bytes: int) -> Tensor:
        return locked(made(size_bytes)) if self._page_locked else torch.empty(size_bytes, dtype=torch.uint8)


def made(size_bytes: int) -> mmap.mmap:
    """Memory of which every page is there, zeroed. Raises OSError."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.uint8).zero_()
    return memory


def locked(memory: mmap.mmap) -> Tensor:
    """The same, page-locked, as (bytes,) uint8, until no tensor uses it any more. Raises RuntimeError."""
    view = np.frombuffer(memory, np.uint8)
    chunk = torch.from_numpy(view)
    address = chunk.data_ptr()
    if error := int(_runtime().cudaHostRegister(address, len(chunk), FOR_ALL_CONTEXTS)):
        raise RuntimeError(f"{len(chunk)} bytes cannot be page-locked: CUDA error {error}")
    # Of the view: an mmap tells of its end when its pages are gone, and the next chunk may have their place.
    weakref.finalize(view, _unlock, address).atexit = False  # the driver may have gone by then
    return chunk


def _unlock(address: int) -> None:
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    """The CUDA runtime's functions, as torch has them."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
