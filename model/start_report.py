"""Who is told how a start goes on."""

from typing import Protocol


class StartReport(Protocol):
    """Called from any thread."""

    def progress(self, what: str, done: int, total: int) -> None:
        """So much of something long is done: bytes of "weights", files of "kernels"."""
        ...

    def ended(self, phase: str) -> None:
        """A phase has ended; the next one begins."""
        ...


class Unreported:
    """A StartReport that nobody reads."""

    def progress(self, what: str, done: int, total: int) -> None: ...

    def ended(self, phase: str) -> None: ...
