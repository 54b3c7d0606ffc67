"""The host memory behind the swap slots: page-locked where a GPU copies to it, else plain. mm's only import of torch.

Page-locking costs about half a second a gigabyte, so the memory is taken in chunks, in a thread, while the server
starts. Slots become usable as their chunks come (`ready_slots`). A chunk that the system refuses ends the area there,
with a warning: the area is then smaller than was asked for.
"""

import logging
import threading

import torch
from torch import Tensor

CHUNK_BYTES = 256 << 20
"""A power of two: allocators of page-locked memory may round up to one."""

log = logging.getLogger("pagewalk.memory")


class BackingStore:
    """`slots` places of `slot_bytes` each."""

    def __init__(self, slots: int, slot_bytes: int, *, page_locked: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Returns at once: the memory comes in the background. chunk_bytes: at least one slot goes into a chunk."""
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._page_locked = page_locked
        self._slots_a_chunk = max(1, chunk_bytes // slot_bytes)
        self._chunks: list[Tensor] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._allocate, name="backing-store", daemon=True)
        if slots:
            self._thread.start()

    @property
    def ready_slots(self) -> int:
        """Slots 0 ... ready_slots - 1 have memory."""
        return min(len(self._chunks) * self._slots_a_chunk, self.slots)

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
        """Stop taking memory, and give it back when nobody uses it any more. Idempotent."""
        self._is_closed = True
        if self._thread.is_alive():
            self._thread.join()

    def _allocate(self) -> None:
        left = self.slots
        while left > 0 and not self._is_closed:
            size = min(left, self._slots_a_chunk)
            try:
                chunk = torch.empty(size * self.slot_bytes, dtype=torch.uint8, pin_memory=self._page_locked)
            except RuntimeError as error:  # torch's word for memory that cannot be had or locked
                log.warning("swap area: %d of %d slots: %s", self.slots - left, self.slots, str(error).splitlines()[0])
                break
            left -= size
            self._chunks.append(chunk)
