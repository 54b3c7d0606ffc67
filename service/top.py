"""`pagewalk top`: a picture of a server on a terminal, drawn anew each second. Keys: q ends, arrows choose, p pauses or
resumes the chosen sequence, k aborts it.
"""

import curses
import time
from typing import Any, Protocol

from service import admin_text

MOST_LINES = 200
BAR = 40
STATES = (("active", "#"), ("cached", "+"), ("free", "."))


class Client(Protocol):
    """The admin endpoint (operator_commands.AdminClient)."""

    def facts(self, view: str, **query: Any) -> dict[str, Any]: ...
    def act(self, action: str, **body: Any) -> dict[str, Any]: ...


class Picture:
    """What there is to see, from two pulses and the list of sequences."""

    def __init__(self, before: dict[str, Any], pulse: dict[str, Any], sequences: dict[str, Any]) -> None:
        self._before = before
        self._pulse = pulse
        self.sequences: list[dict[str, Any]] = sequences["sequences"]
        self._total = sequences["total"]

    def lines(self, width: int) -> list[str]:
        """The whole picture; the table comes last, its head before it."""
        return [*self._folded_head(width), "", *(line[:width] for line in self._table())]

    def head_lines(self, width: int) -> int:
        """Lines before the first sequence."""
        return len(self._folded_head(width)) + 2

    def _folded_head(self, width: int) -> list[str]:
        return [line for phrases in self._head() for line in _folded(phrases, width)]

    def _head(self) -> list[list[str]]:
        """Lines, each as the phrases that stay together where it is folded."""
        pulse, frames, slots = self._pulse, self._pulse["frames"], self._pulse["slots"]
        waits = " ".join(f"{name} {pulse[name]}" for name in ("running", "waiting", "swapped"))
        first = ["pagewalk", f"up {_duration(pulse['uptime_s'])}", f"step {pulse['step']}", waits]
        times = [f"TTFT {self._mean_ms('ttft')}", f"ITL {self._mean_ms('itl')}"]
        counts = [f"{frames[name]} {name}" for name in ("active", "cached", "free", "shared", "pinned")]
        lines = [
            [*first, f"{self._rate('generated_tokens'):.0f} tokens/s", *times],
            [f"Frames [{_bar(frames)}] {frames['total']}:", *counts],
        ]
        if slots["total"]:
            used = slots["total"] - slots["free"]
            filled = round(BAR * used / slots["total"])
            lines.append([f"Swap   [{'#' * filled}{'.' * (BAR - filled)}] {slots['total']}: {used} used"])
        for name in ("memory", "compute"):
            some, full = (pulse["pressure"][name][kind]["avg10"] for kind in ("some", "full"))
            lines.append([f"{name.capitalize():<7} pressure: some {some:.1f} %, full {full:.1f} % of the last 10 s"])
        query, hit = self._rate("prefix_query"), self._rate("prefix_hit")
        rates = (f"{name} {self._rate(name):.0f}/s" for name in ("evict", "preempt", "swap_out", "swap_in"))
        hits = f"{hit / query:.0%}" if query else "-"
        return [*lines, [f"Prefix hits {hits}", *rates]]

    def _table(self) -> list[str]:
        columns = {
            "ID": "id", "STATE": "state", "WAITS-FOR": "wait_reason", "TENANT": "tenant", "PROMPT": "prompt_tokens",
            "OUTPUT": "output_tokens", "RSS": "rss", "PSS": "pss", "SWAP": "swap", "AGE": "age_s", "REQUEST": "request",
        }  # fmt: skip
        lines = admin_text.table(self.sequences, columns).splitlines()
        more = self._total - len(self.sequences)
        return [*lines, f"... and {more} more"] if more else lines

    def _rate(self, counter: str) -> float:
        """Events a second between the two pulses."""
        seconds = self._pulse["ts"] - self._before["ts"]
        change: float = self._pulse["counters"][counter] - self._before["counters"][counter]
        return change / seconds if seconds > 0 else 0.0

    def _mean_ms(self, name: str) -> str:
        now, then = self._pulse["counters"], self._before["counters"]
        count = now[f"{name}_count"] - then[f"{name}_count"]
        if not count:
            return "-"
        return f"{1000 * (now[f'{name}_sum_s'] - then[f'{name}_sum_s']) / count:.1f} ms"


def _folded(phrases: list[str], width: int) -> list[str]:
    """A line, or as many as the phrases need."""
    lines = [phrases[0]]
    for phrase in phrases[1:]:
        if len(lines[-1]) + 2 + len(phrase) <= width:
            lines[-1] += f"  {phrase}"
        else:
            lines.append(f"        {phrase}")
    return [line[:width] for line in lines]


def _bar(frames: dict[str, int]) -> str:
    """A character for each fortieth of the pool."""
    ends, drawn = 0, ""
    for state, sign in STATES:
        ends += frames[state]
        drawn += sign * (round(BAR * ends / frames["total"]) - len(drawn))
    return drawn


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def run(client: Client, interval_s: float) -> int:
    """Until q. Raises Unreachable."""
    code: int = curses.wrapper(_loop, client, interval_s)
    return code


def _loop(screen: Any, client: Client, interval_s: float) -> int:
    curses.curs_set(0)
    before, chosen, message = client.facts("pulse"), 0, ""
    screen.timeout(200)  # the first picture has a difference to show
    while True:
        key = screen.getch()
        if key in (ord("q"), 27):
            return 0
        pulse = client.facts("pulse")
        picture = Picture(before, pulse, client.facts("sequences", limit=MOST_LINES))
        chosen += {curses.KEY_DOWN: 1, curses.KEY_UP: -1}.get(key, 0)
        chosen = max(0, min(chosen, len(picture.sequences) - 1))
        if key != -1:
            message = ""  # of the key before
        if key in (ord("p"), ord("k")) and picture.sequences:
            message = _act(client, picture.sequences[chosen], chr(key))
        _draw(screen, picture, chosen, message)
        before = pulse if pulse["ts"] - before["ts"] >= interval_s / 2 else before
        screen.timeout(int(1000 * interval_s))


def _act(client: Client, sequence: dict[str, Any], key: str) -> str:
    """Pause, resume or abort; returns what to say."""
    action = "abort" if key == "k" else "resume" if sequence["state"] == "paused" else "pause"
    try:
        after = client.act(f"sequences/{sequence['id']}/{action}")["after"]
    except Exception as refusal:  # noqa: BLE001 - whatever it is, the picture goes on
        return f"{action} {sequence['id']}: {refusal}"
    return f"{action} {sequence['id']}: {after['state']}"


def _draw(screen: Any, picture: Picture, chosen: int, message: str) -> None:
    height, width = screen.getmaxyx()
    screen.erase()
    lines = picture.lines(width - 1)
    first = picture.head_lines(width - 1)
    shift = max(0, chosen - (height - first - 3))
    shown = lines[:first] + lines[first + shift :]
    for y, line in enumerate(shown[: height - 1]):
        is_chosen = bool(picture.sequences) and y == first + chosen - shift
        screen.addstr(y, 0, line, curses.A_REVERSE if is_chosen else curses.A_NORMAL)
    screen.addstr(
        height - 1, 0, (message or time.strftime("%H:%M:%S  q quit  p pause or resume  k abort"))[: width - 1]
    )
    screen.refresh()
