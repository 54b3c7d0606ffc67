"""Counters and histograms, and their text for GET /metrics.

Two families of names in one registry: `pagewalk_*`, and the `vllm:*` names that dashboards, autoscalers and gateways of
the field read. Labels are bounded: never a request, a key or a prompt. Everything is there with 0 from the start.

What the engine does every step is counted here, for all Sequences at once. What can be looked up (queues, memory) is
looked up when somebody asks. What front ends count (http_counts.py) is added up then.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import numpy as np
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from service.engine import StepReport
from service.engine_client import Ended, EndReason, EngineSnapshot
from service.histogram import Histogram, token_bounds
from service.http_counts import HttpCounts, Report
from service.request import Sequence as EngineSequence

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_GAP_S = (
    *(0.0005, 0.001, 0.002, 0.004, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
STEP_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

PHASES = ("schedule", "submit", "wait", "commit")


class ServedFacts:
    """What the series say of the model that is served; known once it is loaded."""

    def __init__(
        self,
        *,
        model_name: str,
        dtype: str,
        kernels: str,
        page_size: int,
        frames: int,
        gpu_memory_utilization: float,
        max_model_len: int,
        tier: Literal["gpu", "host"],
        prefix_caching: bool,
        snapshot: Callable[[], EngineSnapshot],
    ) -> None:
        self.snapshot = snapshot
        self.tier = tier
        self.engine = {"kernels": kernels, "dtype": dtype}
        self.labels = {"model_name": model_name, "engine": "0"}
        self.cache = {
            "block_size": str(page_size),
            "num_gpu_blocks": str(frames),
            "cache_dtype": dtype,
            "enable_prefix_caching": str(prefix_caching),  # requests may opt out one by one
            "gpu_memory_utilization": str(gpu_memory_utilization),
        }
        self.max_model_len = max_model_len


class Metrics(Collector):
    """All counts of the server. The engine's observer (engine.py), and the sum of what the front ends have counted."""

    def __init__(self, version: str, *, vllm_names: bool = True) -> None:
        self._version = version
        self._vllm_names = vllm_names
        self._facts: ServedFacts | None = None

        # written by the front end of this process, if there is one; and what those have left that have ended
        self.http = HttpCounts()
        self._front_ends: Callable[[], list[Report]] = list  # the last reports of processes

        self._looked_s = {"metrics": 0.0, "views": 0.0}

        # written by the engine
        self._ended: Counter[EndReason] = Counter(dict.fromkeys(get_args(EndReason), 0))
        self._generated_tokens = 0
        self._first_token_s = Histogram(FIRST_TOKEN_S)
        self._token_gap_s = Histogram(TOKEN_GAP_S)
        self._per_token_s = Histogram(TOKEN_GAP_S)
        self._request_s = {name: Histogram(REQUEST_S) for name in ("e2e", "queue", "inference", "prefill", "decode")}
        self._step_tokens = Histogram(STEP_TOKENS)
        self._step_s = {phase: Histogram(STEP_S) for phase in PHASES}
        self._sequence_tokens = Histogram(())  # bounds depend on the model

        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def serve(self, facts: ServedFacts) -> None:
        """The model is loaded: its series exist from now on."""
        self._facts = facts
        self._sequence_tokens = Histogram(token_bounds(facts.max_model_len))
        self.http.serve(facts.max_model_len)

    def add_front_ends(self, reports: Callable[[], list[Report]]) -> None:
        """Front ends are processes: `reports` gives the last report of each that runs."""
        self._front_ends = reports

    # --- the engine's observer: called in its loop, once a step or once a Sequence

    def step_ended(self, report: StepReport) -> None:
        tokens = report.prefill_tokens + report.decode_tokens
        self._step_tokens.observe(tokens)
        self._generated_tokens += report.sampled_tokens
        gaps_s = report.gaps_s[~np.isnan(report.gaps_s)]
        if len(gaps_s):
            self._token_gap_s.observe_all(gaps_s)
        for phase in PHASES:
            self._step_s[phase].observe(getattr(report, f"{phase}_s"))

    def sequence_ended(self, sequence: EngineSequence, ended: Ended, now: float) -> None:
        self._ended[ended.reason] += 1
        self._request_s["e2e"].observe(now - sequence.submitted_s)
        self._sequence_tokens.observe(ended.output_tokens)
        if sequence.admitted_s is None:
            return
        self._request_s["queue"].observe(sequence.admitted_s - sequence.submitted_s)
        self._request_s["inference"].observe(now - sequence.admitted_s)
        if sequence.first_token_s is None:
            return
        self._first_token_s.observe(sequence.first_token_s - sequence.submitted_s)
        self._request_s["prefill"].observe(sequence.first_token_s - sequence.admitted_s)
        self._request_s["decode"].observe(now - sequence.first_token_s)
        if ended.output_tokens > 1:
            self._per_token_s.observe((now - sequence.first_token_s) / (ended.output_tokens - 1))

    def latencies(self) -> dict[str, object]:
        """Sums and counts since the start that time lines are drawn from."""
        gaps, first = self._token_gap_s, self._first_token_s
        return {
            "generated_tokens": self._generated_tokens,
            "ended": sum(self._ended.values()),
            "ttft_sum_s": first.sum,
            "ttft_count": sum(first.counts),
            "itl_sum_s": gaps.sum,
            "itl_count": sum(gaps.counts),
        }

    # --- what was counted, as text

    def render(self, accept: str) -> tuple[bytes, str]:
        """OpenMetrics where `accept` names it, else text 0.0.4. (The library's own choice fails on odd headers.)"""
        begun = time.thread_time()
        try:
            if openmetrics.CONTENT_TYPE_LATEST.split(";")[0] in accept:
                # Its other ways of escaping take the colon out of the names of samples.
                body: bytes = openmetrics.generate_latest(self._registry, escaping="allow-utf-8")  # type: ignore[no-untyped-call]
                return body, openmetrics.CONTENT_TYPE_LATEST
            return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
        finally:
            self.looked("metrics", time.thread_time() - begun)

    def looked(self, at: Literal["metrics", "views"], seconds: float) -> None:
        """Operators have looked at something, which took the engine's thread so much CPU time."""
        self._looked_s[at] += seconds

    # --- for prometheus_client

    def describe(self) -> list[Metric]:
        """Nothing: asked at registration, to find duplicate names, of which there are none."""
        return []

    def collect(self) -> Iterator[Metric]:
        reports = self._front_ends()
        http = self.http.with_all(reports)
        yield from self._own_processes(http, len(reports))
        if self._facts is None:
            return
        snapshot = self._facts.snapshot()
        yield from self._own_engine(self._facts, snapshot)
        if self._vllm_names:
            yield from self._of_the_field(self._facts, snapshot, http)

    def _own_processes(self, http: HttpCounts, front_ends: int) -> Iterator[Metric]:
        build = GaugeMetricFamily("pagewalk_build_info", "Version of the server", labels=["version"])
        build.add_metric([self._version], 1)
        yield build
        requests = CounterMetricFamily(
            "pagewalk_http_requests", "Requests answered (499: the client left)", labels=["route", "method", "status"]
        )
        for labels, count in sorted(http.requests.items()):
            requests.add_metric(labels, count)
        yield requests
        refusals = CounterMetricFamily(
            "pagewalk_refusals", "Requests answered 429, by the bound met", labels=["reason"]
        )
        for reason, count in http.refusals.items():
            refusals.add_metric([reason], count)
        yield refusals
        yield GaugeMetricFamily("pagewalk_http_inflight", "Requests that are being answered", http.inflight)
        lag = HistogramMetricFamily(
            "pagewalk_event_loop_lag_seconds", "How late the event loop gets to what is due", labels=[]
        )
        loop_lag_s = http.histograms["loop_lag_s"]
        lag.add_metric([], loop_lag_s.buckets(), loop_lag_s.sum)
        yield lag
        yield GaugeMetricFamily("pagewalk_front_ends", "Processes that answer HTTP beside the engine's", front_ends)
        yield CounterMetricFamily("pagewalk_front_end_cpu_seconds", "CPU time of those processes", http.cpu_s)
        looked = CounterMetricFamily(
            "pagewalk_looking_seconds", "CPU time of the engine's loop for what operators look at", labels=["at"]
        )
        for at, seconds in self._looked_s.items():
            looked.add_metric([at], seconds)
        yield looked

    def _own_engine(self, facts: ServedFacts, snapshot: EngineSnapshot) -> Iterator[Metric]:
        memory, counters = snapshot.memory, snapshot.counters
        engine = GaugeMetricFamily("pagewalk_engine_info", "What computes, and in what", labels=list(facts.engine))
        engine.add_metric(list(facts.engine.values()), 1)
        yield engine
        queue = snapshot.queue
        yield GaugeMetricFamily("pagewalk_queue_tokens", "Prompt tokens of requests that wait", queue.tokens)
        wait = "Until all run that wait, by how fast others have left the queue lately; 120 at most"
        yield GaugeMetricFamily("pagewalk_queue_wait_seconds", wait, queue.wait_s)
        frames = GaugeMetricFamily("pagewalk_kv_frames", "Page frames by state", labels=["state"])
        frames.add_metric(["free"], memory.free_frames)
        frames.add_metric(["cached"], memory.cached_frames)
        frames.add_metric(["active"], memory.active_frames)
        frames.add_metric(["copying"], memory.copying_frames)
        frames.add_metric(["reserved"], memory.reserved_frames)
        yield frames
        size = GaugeMetricFamily("pagewalk_kv_bytes", "Memory for keys and values: pool and swap area", labels=["tier"])
        places = {"gpu": 0, "host": memory.total_slots}
        places[facts.tier] += memory.total_frames
        for tier, count in places.items():
            size.add_metric([tier], count * snapshot.frame_bytes)
        yield size
        events = CounterMetricFamily("pagewalk_kv_events", "Events of the memory manager", labels=["kind"])
        kinds = {
            "alloc": counters.allocate,
            "free": counters.free,
            "evict": counters.evict,
            "refault": counters.refault,
            "cow": counters.cow_fault,
            "swap_in": counters.swap_in,
            "swap_out": counters.swap_out,
            "swap_failed": counters.swap_failed,
        }
        for kind, count in kinds.items():
            events.add_metric([kind], count)
        yield events
        stalled = CounterMetricFamily(
            "pagewalk_kv_pressure_stall_seconds",
            "Time that a sequence (some), or all that there were (full), stood still for want of frames",
            labels=["kind"],
        )
        stalled.add_metric(["some"], snapshot.pressure.some.total_us / 1e6)
        stalled.add_metric(["full"], snapshot.pressure.full.total_us / 1e6)
        yield stalled
        returned = CounterMetricFamily(
            "pagewalk_readmitted_tokens",
            "Tokens of sequences that came back after preemption: still cached, or computed again",
            labels=["state"],
        )
        returned.add_metric(["cached"], counters.prefix_recover)
        returned.add_metric(["computed"], counters.prefix_return - counters.prefix_recover)
        yield returned
        steps = HistogramMetricFamily("pagewalk_step_seconds", "Host time of a step by phase", labels=["phase"])
        for phase, histogram in self._step_s.items():
            steps.add_metric([phase], histogram.buckets(), histogram.sum)
        yield steps
        graphs = CounterMetricFamily(
            "pagewalk_graph_steps", "Steps that there was a CUDA graph for (hit), and others (miss)", labels=["graph"]
        )
        graphs.add_metric(["hit"], snapshot.graph_hits)
        graphs.add_metric(["miss"], snapshot.graph_misses)
        yield graphs
        if snapshot.device_memory is not None:
            text = "The most memory that steps have had to compute in"
            peak = snapshot.device_memory.activations_peak_bytes
            yield GaugeMetricFamily("pagewalk_activations_peak_bytes", text, peak)

    def _of_the_field(self, facts: ServedFacts, snapshot: EngineSnapshot, http: HttpCounts) -> Iterator[Metric]:
        keys, values = list(facts.labels), list(facts.labels.values())
        memory, counters = snapshot.memory, snapshot.counters
        waiting = snapshot.queue.requests + snapshot.swapped
        gauges = {
            "num_requests_running": ("Sequences that run", float(snapshot.running)),
            "num_requests_waiting": ("Sequences that wait, in the queue or in swap", float(waiting)),
            "kv_cache_usage_perc": (
                "Share of frames that sequences use, 0 to 1; cached ones count as free",
                memory.active_frames / memory.total_frames,
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=keys)
            gauge.add_metric(values, value)
            yield gauge
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Sequences that wait, by reason", labels=[*keys, "reason"]
        )
        by_reason.add_metric([*values, "capacity"], waiting)
        by_reason.add_metric([*values, "deferred"], 0)  # who waits at a limit of its tenant waits for capacity, too
        yield by_reason
        cache = GaugeMetricFamily("vllm:cache_config_info", "The KV cache", labels=[*keys, *facts.cache])
        cache.add_metric([*values, *facts.cache.values()], 1)
        yield cache

        counts = {
            "prompt_tokens": ("Prompt tokens of answered requests", http.prompt_tokens),
            "prompt_tokens_cached": ("... of them not computed", http.cached_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up in the page cache", counters.prefix_query),
            "prefix_cache_hits": ("... of them found", counters.prefix_hit),
            "generation_tokens": ("Tokens generated", self._generated_tokens),
            "num_preemptions": ("Times a sequence lost its memory to another", snapshot.preemptions),
        }
        for name, (text, count) in counts.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=keys)
            counter.add_metric(values, count)
            yield counter
        success = CounterMetricFamily("vllm:request_success", "Requests ended", labels=[*keys, "finished_reason"])
        for reason, count in self._ended.items():
            success.add_metric([*values, reason], count)
        yield success

        histograms = {
            "time_to_first_token_seconds": self._first_token_s,
            "inter_token_latency_seconds": self._token_gap_s,
            "request_time_per_output_token_seconds": self._per_token_s,
            "e2e_request_latency_seconds": self._request_s["e2e"],
            "iteration_tokens_total": self._step_tokens,
            "request_params_n": http.histograms["choices"],
            "request_generation_tokens": self._sequence_tokens,
        }
        histograms |= {f"request_{name}_time_seconds": h for name, h in self._request_s.items() if name != "e2e"}
        of_prompts = ("prompt", "max_num_generation", "params_max")
        histograms |= {f"request_{name}_tokens": http.histograms[name] for name in of_prompts}
        for name, histogram in histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=keys)
            family.add_metric(values, histogram.buckets(), histogram.sum)
            yield family
