"""Logs: one form for all, JSON lines where nobody watches, and no flood."""

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from service import logs


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_one_json_object_a_line() -> None:
    stream = io.StringIO()
    logs.configure("info", "auto", stream)
    structlog.get_logger("pagewalk.engine").info("step", n=1, path=object, text="a\nb")
    (line,) = lines(stream)
    assert list(line)[:4] == ["timestamp", "level", "event", "logger"]
    assert (line["level"], line["event"], line["logger"], line["n"]) == ("info", "step", "pagewalk.engine", 1)


def test_other_libraries_log_the_same_way() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    logging.getLogger("aiohttp.server").warning("hello %s", "you")
    (line,) = lines(stream)
    assert (line["event"], line["logger"], line["level"]) == ("hello you", "aiohttp.server", "warning")


@pytest.mark.parametrize("format", ["json", "console"])
def test_bytes_that_are_no_text_are_logged_all_the_same(tmp_path: Path, format: logs.Format) -> None:
    with (tmp_path / "log").open("w", encoding="utf-8", errors="backslashreplace") as stream:  # as stderr is
        logs.configure("info", format, stream)
        structlog.get_logger("pagewalk.access").info("request", error="not \udcff\udcfe")
    assert "not \\udcff\\udcfe" in (tmp_path / "log").read_text()


def test_an_exception_stays_on_its_line() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    try:
        raise ValueError("broken")
    except ValueError as error:
        structlog.get_logger("pagewalk").error("failed", exc_info=error)
    (line,) = lines(stream)
    assert "ValueError: broken" in line["exception"]


def test_the_console_is_for_people() -> None:
    stream = io.StringIO()
    logs.configure("info", "console", stream)
    structlog.get_logger("pagewalk.server").info("ready", port=8000)
    assert "ready" in stream.getvalue()
    assert "port=8000" in stream.getvalue()
    assert "\x1b" not in stream.getvalue(), "colours belong on a terminal"


def test_less_than_the_level_is_not_written() -> None:
    stream = io.StringIO()
    logs.configure("warning", "json", stream)
    structlog.get_logger("pagewalk").info("no")
    logging.getLogger("other").info("no")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("source", ["structlog", "logging"])
def test_an_error_that_repeats_is_written_a_few_times_a_minute(source: str) -> None:
    stream, clock = io.StringIO(), Clock()
    logs.configure("info", "json", stream, clock)
    error = structlog.get_logger("x").error if source == "structlog" else logging.getLogger("x").error
    for _ in range(100):
        error("disk full")
    error("another")
    assert [line["event"] for line in lines(stream)] == ["disk full"] * logs.REPEATS + ["another"]
    clock.now += logs.REPEATS_WINDOW_S
    error("disk full")
    assert lines(stream)[-1]["event"] == "disk full"
    if source == "structlog":
        assert lines(stream)[-1]["left_out"] == 100 - logs.REPEATS


def test_information_and_requests_are_never_left_out() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream, Clock())
    for _ in range(20):
        structlog.get_logger("x").info("same")
        logs.log_request(request_id="a", status=500, ttft_ms=1.5)
    assert len(lines(stream)) == 40
    assert lines(stream)[-1]["level"] == "error"


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("status", [200, 500])
def test_the_line_of_a_request_is_as_any_other(form: logs.Format, status: int) -> None:
    """It is made in a shorter way."""
    stream = io.StringIO()
    logs.configure("info", form, stream)
    numbers = {"request_id": "a", "status": status, "finish_reasons": ["stop"], "ttft_ms": None, "kind": object}
    logs.log_request(**numbers)
    write = structlog.get_logger(logs.ACCESS)
    (write.error if status == 500 else write.info)("request", **numbers)
    one, other = (re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME", line) for line in stream.getvalue().splitlines())
    assert one == other
    assert one.count("TIME") == 1


def test_the_line_of_a_request_is_not_written_below_the_level() -> None:
    stream = io.StringIO()
    logs.configure("warning", "json", stream)
    logs.log_request(request_id="a", status=200)
    logs.log_request(request_id="b", status=500)
    assert [line["request_id"] for line in lines(stream)] == ["b"]


def test_the_table_of_repeated_errors_is_bounded() -> None:
    logs.configure("info", "json", io.StringIO(), Clock())
    for number in range(3 * logs.REMEMBERED_EVENTS):
        logging.getLogger("x").error(str(number))
    (repeats,) = logging.getLogger().handlers[0].filters
    assert isinstance(repeats, logs._Repeats)
    assert len(repeats._seen) <= logs.REMEMBERED_EVENTS
