"""Stored tensors of safetensors files, brought into the memory of a GPU by many threads.

    file ──pread──▶ page-locked buffer ──copy engine──▶ tensor         per thread: two buffers, filled in turn

One thread copies some 5 GB/s out of the page cache, and the link to a GPU takes 55: so several read, each a piece at a
time, and while a piece is on its way to the device the next one is read.

The form of a file: 8 bytes little-endian length of the header; the header, JSON: name -> dtype, shape, data_offsets
(begin and end after the header). Whether it is whole, the safetensors library has checked before (loader.py).
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.errors import BadCheckpoint

PIECE_BYTES = 4 << 20
"""Read at a time: large enough for the link's full speed, small enough that its end comes soon after the last read."""

MOST_THREADS = 8
"""On an H200 with 16 cores: 19 GB/s with 4, 29 with 8, no more with 12 or 16. Their buffers take 64 MiB, which torch
keeps, and which the first chunk of the swap area gets (mm/backing_store.py)."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, in bytes of its file."""

    path: Path
    dtype: torch.dtype
    begin: int
    end: int


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file. Raises BadCheckpoint for number formats that no network here is stored in."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        if about["dtype"] not in DTYPES:
            raise BadCheckpoint(f"{path}: {name} is stored as {about['dtype']}, not as one of {', '.join(DTYPES)}")
        begin, end = about["data_offsets"]
        found[name] = StoredTensor(path, DTYPES[about["dtype"]], 8 + length + begin, 8 + length + end)
    return found


@dataclass(frozen=True, slots=True)
class _Piece:
    file: int  # descriptor
    dtype: torch.dtype
    at: int
    size_bytes: int
    target: Tensor  # (elements,) of the piece


def read_tensors(
    wanted: Sequence[tuple[StoredTensor, Tensor]],
    device: torch.device,
    report: Callable[[int, int], None] | None = None,
    *,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Fill each target, a contiguous tensor on `device`, with a stored one of as many elements. Converts the dtype.

    report(done_bytes, total_bytes). Raises BadCheckpoint if a file is shorter than its header says; OSError.
    """
    with ExitStack() as opened:
        files = {path: opened.enter_context(path.open("rb")).fileno() for path in {each.path for each, _ in wanted}}
        pieces = [piece for stored, target in wanted for piece in _cut(stored, files, target, piece_bytes)]
        total = sum(piece.size_bytes for piece in pieces)
        queue, lock, done = iter(pieces), threading.Lock(), 0

        def next_piece(read: int) -> _Piece | None:
            nonlocal done
            with lock:
                done += read
                if report is not None and read:
                    report(done, total)
                return next(queue, None)

        threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)), len(pieces)))
        staging = torch.empty(2 * threads * piece_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        buffers = staging.split(piece_bytes)
        with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
            readers = [pool.submit(_Reader(device, buffers[2 * i : 2 * i + 2]).run, next_piece) for i in range(threads)]
        for reader in readers:
            reader.result()


def _cut(stored: StoredTensor, files: dict[Path, int], target: Tensor, piece_bytes: int) -> Iterator[_Piece]:
    size, flat = stored.dtype.itemsize, target.view(-1)
    step = piece_bytes // size
    assert (stored.end - stored.begin) == flat.numel() * size, "shapes are compared before"
    for first in range(0, flat.numel(), step):
        part = flat[first : first + step]
        yield _Piece(files[stored.path], stored.dtype, stored.begin + first * size, part.numel() * size, part)


class _Reader:
    """One thread: reads into its buffers in turn."""

    def __init__(self, device: torch.device, buffers: Sequence[Tensor]) -> None:
        self._device, self._buffers = device, buffers
        self._on_gpu = device.type == "cuda"

    def run(self, next_piece: Callable[[int], _Piece | None]) -> None:
        """Until there are no more. `next_piece` is told how many bytes the one before had."""
        stream = torch.cuda.Stream(self._device) if self._on_gpu else None
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            copied: list[torch.cuda.Event | None] = [None, None]
            turn, read = 0, 0
            while (piece := next_piece(read)) is not None:
                if (event := copied[turn]) is not None:
                    event.synchronize()
                buffer = self._buffers[turn][: piece.size_bytes]
                _read(piece, buffer)
                source = buffer.view(piece.dtype)
                if source.dtype != piece.target.dtype and self._on_gpu:
                    source = source.to(self._device, non_blocking=True)  # converted there, not by one core here
                piece.target.copy_(source, non_blocking=True)
                if stream is not None:
                    copied[turn] = torch.cuda.Event()
                    copied[turn].record(stream)  # type: ignore[union-attr]
                turn, read = 1 - turn, piece.size_bytes
            if stream is not None:
                stream.synchronize()


def _read(piece: _Piece, buffer: Tensor) -> None:
    view = buffer.numpy().data
    got = 0
    while got < piece.size_bytes:
        count = os.preadv(piece.file, [view[got:]], piece.at + got)
        if count == 0:
            raise BadCheckpoint("a weight file has become shorter while it was read")
        got += count
