"""Views of the engine's process itself: its settings, threads, stacks, and a profile."""

import asyncio
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import msgspec

from service.admin_views import Facts, Inside, View
from service.errors import NotFound, QueueFull
from service.questions import Look
from service.settings import FIELDS, SECRETS, Origin, Settings
from service.tenant_settings import as_tables

SAMPLE_S = 0.01
"""Between two samples of a profile: some 50 us each, so half a percent of a core."""


def config_of(settings: Settings, origins: Mapping[str, Origin]) -> View:
    """The view `config`."""

    def config(inside: Inside, asked: Look) -> Facts:
        """Every setting with where it came from; secrets are masked."""
        values = msgspec.to_builtins(settings)
        shown = [
            {
                "name": name,
                "value": "***" if name in SECRETS and values[name] else values[name],
                "origin": origins.get(name, "default"),
            }
            for name in FIELDS
        ]
        return {"settings": shown, "tenants": as_tables(settings.tenants)}

    return config


def threads(inside: Inside, asked: Look) -> Facts:
    """Every thread with the CPU time that it has used, of Python and of libraries."""
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    ticks = os.sysconf("SC_CLK_TCK")
    found = []
    for task in sorted(Path("/proc/self/task").iterdir(), key=lambda path: int(path.name)):
        try:
            fields = (task / "stat").read_text().rpartition(")")
        except OSError:
            continue  # it has just ended
        state, *numbers = fields[2].split()
        found.append(
            {
                "thread": int(task.name),
                "name": named.get(int(task.name), fields[0].partition("(")[2]),
                "is_python": int(task.name) in named,
                "state": state,
                "user_s": int(numbers[10]) / ticks,
                "system_s": int(numbers[11]) / ticks,
            }
        )
    return {"process": os.getpid(), "threads": found}


def stacks(inside: Inside, asked: Look) -> Facts:
    """Where every thread and every task is just now, outermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    return {
        "threads": [
            {"name": names.get(ident, str(ident)), "frames": [_line(each) for each in _frames(frame)]}
            for ident, frame in frames.items()
        ],
        "tasks": [{"name": task.get_name(), "frames": [_line(frame) for frame in task.get_stack()]} for task in tasks],
    }


def _frames(innermost: FrameType | None) -> list[FrameType]:
    """Of a stack, outermost first. No source is read, as `traceback` would."""
    found = []
    while innermost is not None:
        found.append(innermost)
        innermost = innermost.f_back
    return found[::-1]


def _line(frame: FrameType) -> str:
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_qualname}"


def _short(path: str) -> str:
    """A file without the folders that Python has found it in."""
    return "/".join(Path(path).parts[-2:])


class Profiler:
    """Samples all threads of Python for some seconds. One profile at a time, the last one is kept."""

    def __init__(self) -> None:
        self._number = 0
        self._until_s = 0.0
        self._seconds = 0.0
        self._samples = 0
        self._stacks: Counter[tuple[str, ...]] = Counter()

    def start(self, inside: Inside, asked: Look) -> Facts:
        """Begin; the answer has its number. Raises QueueFull while another runs."""
        seconds = float(asked.of)
        left_s = self._until_s - time.monotonic()
        if left_s > 0:
            raise QueueFull("a profile is being taken", retry_after_s=int(left_s) + 1)
        self._number += 1
        self._seconds, self._until_s = seconds, time.monotonic() + seconds
        self._samples, self._stacks = 0, Counter()
        threading.Thread(target=self._sample, args=(self._until_s,), name="profiler", daemon=True).start()
        return {"number": self._number}

    def result(self, inside: Inside, asked: Look) -> Facts:
        """What a profile has found, as far as it has come. Raises NotFound if it is not the last one."""
        if asked.of != str(self._number):
            raise NotFound("this profile is not kept any more")
        stacks = self._stacks.most_common()
        return {
            "is_over": time.monotonic() >= self._until_s,
            "seconds": self._seconds,
            "samples": self._samples,
            "stacks": [{"stack": list(stack), "samples": count} for stack, count in stacks],
        }

    def _sample(self, until_s: float) -> None:
        own = threading.get_ident()
        while time.monotonic() < until_s:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            found = {
                (names.get(ident, "?"), *map(_function, _frames(frame)))
                for ident, frame in sys._current_frames().items()
                if ident != own
            }
            self._stacks.update(found)
            self._samples += 1
            time.sleep(SAMPLE_S)


def _function(frame: FrameType) -> str:
    return f"{_short(frame.f_code.co_filename)}:{frame.f_code.co_qualname}"


def process_views(settings: Settings, origins: Mapping[str, Origin]) -> dict[str, View]:
    """All views of this file."""
    profiler = Profiler()
    return {
        "config": config_of(settings, origins),
        "threads": threads,
        "stacks": stacks,
        "profile/start": profiler.start,
        "profile/result": profiler.result,
    }
