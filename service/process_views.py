"""Views of the engine's process itself: its settings, threads, stacks, and a profile."""

import asyncio
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

import msgspec

from service.admin_views import Facts, Inside, View
from service.errors import BadRequest, NotFound, QueueFull, ServiceUnavailable
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
    """Looks for some seconds where time goes: one profile at a time, the last one is kept."""

    def __init__(self) -> None:
        self._number = 0
        self._thread: threading.Thread | None = None
        self._seconds = 0.0
        self._until_s = 0.0
        self._found: Facts = {}

    def start(self, inside: Inside, asked: Look) -> Facts:
        """Begin one of all threads, sampled; the answer has its number. Raises QueueFull while another runs."""
        return self._start(float(asked.of), self._sample)

    def start_device(self, inside: Inside, asked: Look) -> Facts:
        """The same of the GPU, by kernels. Raises BadRequest where there is none."""
        if inside.engine.executor.device_memory is None:
            raise BadRequest("this server computes on the CPU: its threads are all there is to profile", param="of")
        return self._start(float(asked.of), self._record)

    def _start(self, seconds: float, work: Callable[[float], Facts]) -> Facts:
        if self._thread is not None and self._thread.is_alive():
            left_s = max(0.0, self._until_s - time.monotonic())
            raise QueueFull("a profile is being taken", retry_after_s=int(left_s) + 1)
        self._number += 1
        self._seconds, self._until_s, self._found = seconds, time.monotonic() + seconds, {}

        def run() -> None:
            self._found = work(seconds)

        self._thread = threading.Thread(target=run, name="profiler", daemon=True)
        self._thread.start()
        return {"number": self._number}

    def result(self, inside: Inside, asked: Look) -> Facts:
        """What a profile has found, once it is over. Raises NotFound if it is not the last one, ServiceUnavailable."""
        if asked.of != str(self._number) or self._thread is None:
            raise NotFound("this profile is not kept any more")
        is_over = not self._thread.is_alive()
        if is_over and not self._found:
            raise ServiceUnavailable("the profile failed: the log of the server says why")
        return {"is_over": is_over, "seconds": self._seconds} | self._found

    def _sample(self, seconds: float) -> Facts:
        own, until_s, samples = threading.get_ident(), time.monotonic() + seconds, 0
        stacks: Counter[tuple[str, ...]] = Counter()
        while time.monotonic() < until_s:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            stacks.update(
                {
                    (names.get(ident, "?"), *map(_function, _frames(frame)))
                    for ident, frame in sys._current_frames().items()
                    if ident != own
                }
            )
            samples += 1
            time.sleep(SAMPLE_S)
        found = [{"stack": list(stack), "samples": count} for stack, count in stacks.most_common()]
        return {"samples": samples, "stacks": found}

    def _record(self, seconds: float) -> Facts:
        from model.device_profile import kernel_times

        found = kernel_times(seconds)
        busy_s = sum(kernel.seconds for kernel in found)
        kernels = [{"kernel": each.name, "calls": each.calls, "ms": round(1000 * each.seconds, 3)} for each in found]
        return {"busy_ms": round(1000 * busy_s, 3), "kernels": kernels}


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
        "profile/start_device": profiler.start_device,
        "profile/result": profiler.result,
    }
