"""Carries swap orders out on a GPU: whole frames between the pool and page-locked host memory, by the copy engine.

    step stream    ── step k ──┬── step k + 1 ──── step k + 2 ──
    side stream                └─▶ wait ─▶ copies ─▶ event: ended

A frame, all layers, is one run of bytes, so a copy is one call; runs of neighbouring frames and slots are one call too.
The copy engine does the work: kernels that run beside it keep their speed.
"""

import ctypes
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from cuda.frames import FramePool
from cuda.launch import driver
from mm.addresses import Int32Array
from mm.backing_store import BackingStore
from mm.page_copies import SwapOrders
from model.out_of_memory import is_out_of_memory


@dataclass(slots=True)
class _Moving:
    """An order under way; `event` is None if it could not be started."""

    ticket: int
    event: torch.cuda.Event | None
    store: BackingStore  # keeps its memory until then


class SwapMover:
    """`mm.page_copies.PageMover` between one pool and one backing store."""

    def __init__(self, pool: FramePool, store: BackingStore) -> None:
        self._pool, self._store = pool, store
        self._base, self._size = pool.layer_address(0), pool.layout.frame_bytes
        self._stream = torch.cuda.Stream(pool.data.device)
        self._raw_stream = ctypes.c_void_p(int(self._stream.cuda_stream))
        self._moving: deque[_Moving] = deque()

    def start(self, orders: SwapOrders, after: torch.cuda.Stream, store: BackingStore | None = None) -> None:
        """Enqueue the copies, behind all that is in `after` now. Every slot must be ready.

        store: whose slots are meant, of the same size; None: this mover's.
        """
        if not len(orders):
            return
        store = self._store if store is None else store
        try:
            event = self._enqueue(orders, after, store)
        except (MemoryError, RuntimeError) as error:  # an event takes memory, too
            if not is_out_of_memory(error):
                raise
            event = None
        if event is None:
            self._stream.synchronize()  # what has been started still reads and writes; raises what broke the device
        self._moving.append(_Moving(orders.ticket, event, store))

    def _enqueue(self, orders: SwapOrders, after: torch.cuda.Stream, store: BackingStore) -> torch.cuda.Event | None:
        """The event that ends the copies; None if one could not be started."""
        self._stream.wait_stream(after)
        good = self._copy(orders.out_frames, orders.out_slots, store, is_out=True)
        good = good and self._copy(orders.in_frames, orders.in_slots, store, is_out=False)
        if not good:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def ended(self) -> list[tuple[int, bool]]:
        """Tickets that ended, in order, and whether all copies succeeded. Never blocks."""
        ended = []
        while self._moving and ((event := self._moving[0].event) is None or event.query()):
            moved = self._moving.popleft()
            ended.append((moved.ticket, moved.event is not None))
        return ended

    def close(self) -> None:
        self._stream.synchronize()

    def _copy(self, frames: Int32Array, slots: Int32Array, store: BackingStore, *, is_out: bool) -> bool:
        """Enqueue the copies of one direction, neighbours in one call. False if the driver refuses one."""
        if not len(frames):
            return True
        order = np.argsort(slots, kind="stable")
        frames, slots = frames[order], slots[order]
        joined = (np.diff(frames) == 1) & (np.diff(slots) == 1)
        joined &= np.array([store.are_neighbours(slot) for slot in slots[:-1].tolist()], np.bool_)
        starts = np.concatenate(([0], np.flatnonzero(~joined) + 1, [len(frames)]))
        copy = driver().cuMemcpyAsync
        for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            device = ctypes.c_void_p(self._base + int(frames[first]) * self._size)
            host = ctypes.c_void_p(store.address(int(slots[first])))
            target, source = (host, device) if is_out else (device, host)
            if copy(target, source, ctypes.c_size_t((last - first) * self._size), self._raw_stream):
                return False
        return True
