"""Progress: a bar for people, few lines for logs."""

import io
import sys

import pytest
from structlog.testing import capture_logs

from service.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress("weights")
    for done in range(101):
        progress(done * 1_000_000, 100_000_000)
    progress.close()
    progress.close()
    drawn = terminal.getvalue().split("\r")
    assert len(drawn) == 41, "once a column"
    assert drawn[-1] == f"weights    [{'#' * 40}] 100% of 100 MB \n"


def test_a_line_each_tenth_but_not_more_than_one_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now = [0.0]
    progress = Progress("weights", clock=lambda: now[0])
    with capture_logs() as lines:
        for done in range(1, 101):
            now[0] += 0.15 if done <= 50 else 0.01
            progress(done, 100)
        progress.close()
    assert [line["percent"] for line in lines] == [10, 20, 30, 40, 50]


def test_nothing_to_do_is_done() -> None:
    Progress("weights")(0, 0)
