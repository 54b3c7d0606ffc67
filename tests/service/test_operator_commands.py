"""`pagewalk ps` and its siblings against a real server: what they print, with which key, and how they fail."""

import asyncio
import json
import os
import pty
import re
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model

from service.operator_commands import COMMANDS, AdminClient, main
from service.top import Picture


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealHouse]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    async with real_house(monkeypatch, folder, max_model_len=4000, admin_api_key="root") as house:
        monkeypatch.setenv("PAGEWALK_ADMIN_URL", f"http://127.0.0.1:{house.server.admin_port}")
        monkeypatch.setenv("PAGEWALK_ADMIN_API_KEY", "root")
        yield house


Captured = pytest.CaptureFixture[str]


async def said(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr: in a thread, since the server runs in this loop."""
    capsys.readouterr()
    code = await asyncio.to_thread(main, list(arguments))
    out, err = capsys.readouterr()
    return code, re.sub(r"^\d{4}-\d\d-\d\d .*\n", "", out, flags=re.MULTILINE), err  # without the server's log


async def running(house: RealHouse) -> "asyncio.Task[Any]":
    body = {"prompt": [5, 6, 7], "max_tokens": 3900, "ignore_eos": True, "request_id": "mine", "stream": True}
    begun = asyncio.Event()

    async def read() -> None:
        async with house.session.post(house.url + "/v1/completions", json=body) as response:
            async for _ in response.content:
                begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    return task


async def leave(house: RealHouse, reading: "asyncio.Task[Any]") -> None:
    reading.cancel()
    async with asyncio.timeout(60):
        while house.engine.scheduler.has_work or house.engine.scheduler.sequences.paused:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_each_command_says_what_its_view_does(house: RealHouse, capsys: Captured) -> None:
    reading = await running(house)
    code, out, _ = await said(capsys, "ps")
    head, line, *holders = out.splitlines()
    assert (code, head.split()[:2], line.split()[1], line.split()[-1]) == (0, ["ID", "STATE"], "decode", "mine")
    assert [holder.split()[:2] for holder in holders] == [["transfer", "holder"]]
    code, out, _ = await said(capsys, "meminfo")
    assert re.search(r"^total: +\d+ frames$", out, re.MULTILINE)
    code, out, _ = await said(capsys, "maps", "mine")
    assert (code, out.startswith("00000000-")) == (0, True)
    code, out, _ = await said(capsys, "trace", "--event", "allocate", "--limit", "3")
    assert (code, out.count(": allocate: place=")) == (0, 3)
    code, out, _ = await said(capsys, "audit")
    assert (code, out.startswith("balanced true\n")) == (0, True)
    code, out, _ = await said(capsys, "ps", "--json")
    assert json.loads(out)["sequences"][0]["request"] == "mine"
    code, out, _ = await said(capsys, "top", "--once", "--interval", "0.2")
    assert code == 0
    assert re.search(r"running 1 .* tokens/s", out)
    assert re.search(r"Frames \[[#+.]{40}\]", out)
    assert "mine" in out
    await leave(house, reading)


async def test_failures_are_one_line(house: RealHouse, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, code in {
        ("maps", "nobody"): 1,
        ("ps", "--key", "wrong"): 1,
        ("ps", "--url", "http://127.0.0.1:9"): 1,
        ("ps", "--url", "127.0.0.1:8001"): 2,
        ("ps", "--url", "http://["): 2,
        ("ps", "--url", "http://127.0.0.1:99999"): 2,
        ("ps", "--key", "a\nb"): 2,
        ("ps", "--limit", "0"): 1,
        ("ps", "--lunch"): 2,
        ("maps",): 2,
    }.items():
        found, out, err = await said(capsys, *arguments)
        assert (found, out) == (code, ""), arguments
        assert re.fullmatch(r"pagewalk: error: .+\n", err), arguments
    monkeypatch.delenv("PAGEWALK_ADMIN_API_KEY")
    assert (await said(capsys, "ps"))[0] == 1


SHORT = b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"
OTHERS = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body) for body in (b"{}", b"[]", b"null")]
BROKEN_CHUNK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: {\n\n"


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("ps",), SHORT),
        (("ps", "--json"), SHORT),
        (("top", "--once"), BROKEN_CHUNK),
        (("trace", "--follow"), BROKEN_CHUNK),
        *(
            ((command, *more), other)
            for command, *more in (("audit",), ("ps", "--json"), ("top", "--once"))
            for other in OTHERS
        ),
    ],
)
def test_an_answer_that_breaks_off_or_is_another_s_is_one_line(
    arguments: tuple[str, ...], answer: bytes, capsys: Captured
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.recv(65536)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        code = main([*arguments, "--url", f"http://127.0.0.1:{server.getsockname()[1]}"])
        thread.join()
    out, err = capsys.readouterr()
    assert (code, out) == (1, "")
    is_whole = answer in OTHERS
    assert re.fullmatch(rf"pagewalk: error: .+ {'is not the admin' if is_whole else 'broke off its answer: '}.+\n", err)


def test_what_does_not_balance_is_told_by_the_exit_code(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"ts": 0.0, "step": 1, "uptime_s": 1.0, "balanced": False, "discrepancies": ["frame 3: lost"], "total": 9}
    monkeypatch.setattr(AdminClient, "facts", lambda client, view: facts)
    assert main(["audit"]) == 1
    assert capsys.readouterr().out == "balanced false\ntotal 9\ndiscrepancy frame 3: lost\n"


async def command(house: RealHouse, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "service", *arguments, **options)


async def test_a_trace_is_followed(house: RealHouse) -> None:
    process = await command(house, "trace", "--follow", "--event", "release", stdout=subprocess.PIPE)
    assert process.stdout is not None
    seen: list[bytes] = []

    async def read() -> None:
        assert process.stdout is not None
        while not any(b"follow-me" in line for line in seen):
            seen.append(await process.stdout.readline())

    reading = asyncio.create_task(read())
    async with asyncio.timeout(60):
        await house.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "request_id": "follow-me"})
        await reading
    process.terminate()
    await process.wait()
    assert b": release: place=" in seen[-1]


@pytest.mark.parametrize("interval", ["-1", "0", "nan", "inf", "1e9"])
def test_an_interval_that_cannot_be_is_refused_in_one_line(capsys: Captured, interval: str) -> None:
    assert main(["top", "--once", "--interval", interval, "--url", "http://127.0.0.1:1"]) == 2
    assert re.fullmatch(r"pagewalk: error: --interval \S+: 0.1 to 3600 seconds\n", capsys.readouterr().err)


async def test_top_draws_and_ends_with_q(house: RealHouse) -> None:
    """In a terminal: it shows the sequence, pauses it with p, and leaves the terminal as it was."""
    reading = await running(house)
    ours, theirs = pty.openpty()
    environ = os.environ | {"TERM": "xterm", "LINES": "30", "COLUMNS": "120"}
    process = await command(house, "top", "--interval", "0.2", stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    seen = b""

    async def until(text: bytes) -> None:
        nonlocal seen
        async with asyncio.timeout(60):
            while text not in seen:
                seen += await asyncio.to_thread(os.read, ours, 65_536)

    await until(b"mine")
    os.write(ours, b"p")
    await until(b"paused")
    assert b"tokens/s" in seen
    seen = b""
    os.write(ours, b" ")
    await until(b"k abort")  # any key: what was done has been read
    os.write(ours, b"q")
    async with asyncio.timeout(60):
        while True:
            try:
                if not await asyncio.to_thread(os.read, ours, 65_536):
                    break
            except OSError:  # its end of the terminal is closed
                break
        assert await process.wait() == 0
    os.close(ours)
    await leave(house, reading)


def test_a_picture_says_what_has_changed_between_two_pulses() -> None:
    """And nothing of its head is cut off by a terminal of 80 columns."""
    stall = {"avg10": 12.5, "avg60": 0.0, "avg300": 0.0, "total_us": 1}
    names = ("generated_tokens", "ended", "prefix_query", "prefix_hit", "swap_in", "swap_out", "evict", "preempt")
    counters = dict.fromkeys((*names, "ttft_sum_s", "ttft_count", "itl_sum_s", "itl_count"), 0)
    pulse: dict[str, Any] = {
        "ts": 100.0, "step": 7, "uptime_s": 3725.0, "running": 2, "waiting": 1, "swapped": 0,
        "frames": {"total": 80, "free": 20, "cached": 20, "active": 40, "shared": 4, "saved": 1, "pinned": 0},
        "slots": {"total": 10, "free": 5},
        "pressure": {"memory": {"some": stall, "full": stall}, "compute": {"some": stall, "full": stall}},
        "counters": counters,
    }  # fmt: skip
    later = pulse | {
        "ts": 102.0,
        "counters": counters
        | {"generated_tokens": 200, "ttft_sum_s": 0.5, "ttft_count": 5, "prefix_query": 10, "prefix_hit": 9},
    }
    lines = Picture(pulse, later, {"sequences": [], "total": 0}).lines(200)
    assert "up 1:02:05" in lines[0]
    assert "100 tokens/s  TTFT 100.0 ms  ITL -" in lines[0]
    assert "[####################++++++++++..........] 80" in lines[1]
    assert "[####################....................] 10: 5 used" in lines[2]
    assert "some 12.5 %" in lines[3]
    assert "Prefix hits 90%" in lines[5]
    narrow = Picture(pulse, later, {"sequences": [], "total": 0})
    shown = narrow.lines(79)
    assert all(len(line) <= 79 for line in shown)
    assert shown[narrow.head_lines(79) - 1].startswith("ID")
    for phrase in ("ITL -", "20 free", "4 shared", "0 pinned", "swap_in 0/s"):
        assert any(phrase in line for line in shown), phrase


def test_every_command_is_known_to_the_command_line() -> None:
    found = subprocess.run([sys.executable, "-m", "service", "--help"], capture_output=True, text=True, check=True)
    for name in COMMANDS:
        assert re.search(rf"^ +{name} ", found.stdout, re.MULTILINE), name
