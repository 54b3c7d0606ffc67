"""What one front end counts of its requests. Each process counts for itself; /metrics shows the sum.

    front end ── Report, every second and when asked ──▶ engine's process: the last one of each, and of those that ended

A report has totals and not what is new, so one that comes twice, or late, changes nothing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from typing import get_args

import msgspec

from service.errors import RefusalReason
from service.generation import PromptNumbers
from service.histogram import Histogram, token_bounds

LOOP_LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
LOOP_PROBE_S = 0.25


class Report(msgspec.Struct, frozen=True, tag="report"):
    """All that a front end has counted since it began, and how many requests it has now."""

    requests: list[tuple[str, str, str, int]] = []  # route, method, status, count
    inflight: int = 0
    generating: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    histograms: dict[str, tuple[list[int], float]] = {}  # name -> counts per bucket, sum
    cpu_s: float = 0.0  # of the process
    refused: dict[RefusalReason, int] = {}


class HttpCounts:
    """The counts of one front end (front_end.HttpMetrics), or of several together."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.refusals: Counter[RefusalReason] = Counter(dict.fromkeys(get_args(RefusalReason), 0))
        self.inflight = self.prompt_tokens = self.cached_tokens = 0
        self.cpu_s = 0.0  # of front ends that are processes of their own
        self.histograms = {"choices": Histogram((1, 2, 5, 10, 20)), "loop_lag_s": Histogram(LOOP_LAG_S)}

    def serve(self, max_model_len: int) -> None:
        """The model is loaded. Bounds of the histograms of tokens depend on it: equal models, equal bounds."""
        bounds = token_bounds(max_model_len)
        self.histograms |= {name: Histogram(bounds) for name in ("prompt", "max_num_generation", "params_max")}

    # --- counting

    def http_started(self) -> None:
        self.inflight += 1

    def http_ended(self, route: str, method: str, status: int) -> None:
        self.inflight -= 1
        self.requests[route, method if method in METHODS else "other", str(status)] += 1

    def refused(self, reason: RefusalReason) -> None:
        self.refusals[reason] += 1

    def prompt_ended(self, numbers: PromptNumbers) -> None:
        """What counts once for a prompt, however many choices it has. Only once a model is there."""
        self.histograms["choices"].observe(numbers.choices)
        self.histograms["prompt"].observe(numbers.prompt_tokens)
        self.histograms["max_num_generation"].observe(numbers.longest_output)
        self.histograms["params_max"].observe(numbers.max_tokens)
        if numbers.is_answered:
            self.prompt_tokens += numbers.prompt_tokens
            self.cached_tokens += numbers.cached_tokens

    async def watch_loop(self) -> None:
        """Measure for how long the event loop does not get to what is due. Runs until cancelled."""
        loop, lag = asyncio.get_running_loop(), self.histograms["loop_lag_s"]
        while True:
            due = loop.time() + LOOP_PROBE_S
            await asyncio.sleep(LOOP_PROBE_S)
            lag.observe(max(0.0, loop.time() - due))

    # --- from process to process

    def report(self, generating: int) -> Report:
        return Report(
            requests=[(*labels, count) for labels, count in self.requests.items()],
            inflight=self.inflight,
            generating=generating,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            histograms={name: (each.counts, each.sum) for name, each in self.histograms.items()},
            cpu_s=time.process_time(),
            refused=dict(self.refusals),
        )

    def add(self, report: Report, *, is_over: bool = False) -> None:
        """Add the totals of another front end. is_over: it has ended, and what it had open with it."""
        for route, method, status, count in report.requests:
            self.requests[route, method, status] += count
        self.refusals.update(report.refused)
        self.inflight += 0 if is_over else report.inflight
        self.prompt_tokens += report.prompt_tokens
        self.cached_tokens += report.cached_tokens
        self.cpu_s += report.cpu_s
        for name, (counts, total) in report.histograms.items():
            if name not in self.histograms:
                continue  # of a model that this process is still loading
            self.histograms[name].add(counts, total)

    def with_all(self, reports: Iterable[Report]) -> "HttpCounts":
        """These counts and those of the reports, as an object of its own."""
        total = HttpCounts()
        for name, each in self.histograms.items():
            total.histograms[name] = Histogram(each.bounds)
        own = self.report(0)
        total.add(msgspec.structs.replace(own, cpu_s=self.cpu_s))
        for report in reports:
            total.add(report)
        return total
