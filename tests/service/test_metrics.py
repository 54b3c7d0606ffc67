"""Metrics: names, values, and text that Prometheus reads."""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from mm import EventCounters, MemoryInformation, Pressure, Stall
from model.executor import DeviceMemory
from service.engine import StepReport
from service.engine_client import Ended, EngineSnapshot, QueueState
from service.generation import PromptNumbers
from service.histogram import Histogram
from service.metrics import TOKEN_GAP_S, Metrics, ServedFacts

MEMORY = MemoryInformation(
    total_frames=100,
    free_frames=60,
    cached_frames=12,
    active_frames=25,
    copying_frames=3,
    shared_frames=0,
    references=25,
    rows=3,
    tokens=390,
    unused_tokens=10,
    page_size=16,
    total_slots=40,
)
REPORT = StepReport(
    step=1,
    prefill_tokens=100,
    decode_tokens=3,
    sampled_tokens=4,
    graph_hit=True,
    gaps_s=np.array([0.004, 0.02, 0.02, np.nan]),
    schedule_s=3e-5,
    submit_s=1e-5,
    wait_s=0.01,
    commit_s=4e-5,
)


COUNTERS = EventCounters(
    allocate=30,
    free=5,
    cow_fault=1,
    fork=0,
    truncate=0,
    prefix_query=640,
    prefix_hit=96,
    prefix_return=50,
    prefix_recover=32,
    evict=6,
    refault=2,
    swap_in=3,
    swap_out=4,
)


def served(**changes: Any) -> ServedFacts:
    snapshot = EngineSnapshot(
        state="ready",
        step=1,
        uptime_s=1.0,
        running=3,
        swapped=4,
        queue=QueueState(2, 30, 4),
        preemptions=7,
        memory=MEMORY,
        counters=COUNTERS,
        pressure=Pressure(some=Stall(1.5, 0.5, 0.1, 2_500_000), full=Stall(0.0, 0.0, 0.0, 250_000)),
        frame_bytes=1024,
        device_memory=DeviceMemory(777, 1, 2, 3),
        graph_hits=9,
        graph_misses=4,
    )
    facts: dict[str, Any] = {
        "model_name": 'a "model"\n',
        "dtype": "bfloat16",
        "kernels": "native",
        "page_size": 16,
        "frames": 100,
        "gpu_memory_utilization": 0.9,
        "max_model_len": 8192,
        "tier": "host",
        "prefix_caching": True,
        "snapshot": lambda: snapshot,
    }
    return ServedFacts(**(facts | changes))


def values(metrics: Metrics, accept: str = "") -> dict[str, float]:
    """Samples by name and by those labels that are not the same everywhere."""
    body, content_type = metrics.render(accept)
    assert content_type.startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + ("" if not labels else str(sorted(labels.items())))] = sample.value
    return found


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics("1.2.3")
    metrics.serve(served())
    return metrics


def sequence(**times: float | None) -> Any:
    base = {"submitted_s": 1.0, "admitted_s": 1.5, "first_token_s": 2.0, "prompt_tokens": 40, "max_tokens": 100}
    return SimpleNamespace(**(base | times))


FIELD_NAMES = [
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"),
    *("cache_config_info", "prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total"),
    *("num_preemptions_total", "request_success_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *(
        f"{name}_count"
        for name in (
            *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
            *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
            *("request_prefill_time_seconds", "request_decode_time_seconds", "iteration_tokens_total"),
            *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
            *("request_params_max_tokens", "request_params_n"),
        )
    ),
]


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_every_series_is_there_from_the_start(metrics: Metrics, name: str) -> None:
    found = {key.split("[")[0] for key in values(metrics)}
    assert f"vllm:{name}" in found


def test_names_of_the_field_can_be_left_out() -> None:
    metrics = Metrics("1", vllm_names=False)
    metrics.serve(served())
    found = values(metrics)
    assert not any(name.startswith("vllm:") for name in found)
    assert found["pagewalk_kv_frames[('state', 'active')]"] == 25


def test_before_a_model_is_loaded_the_process_is_seen() -> None:
    found = values(Metrics("1.2.3"))
    assert found["pagewalk_build_info[('version', '1.2.3')]"] == 1
    assert found["process_resident_memory_bytes"] > 0
    assert any(name.startswith("python_gc_") for name in found)


def test_what_the_engine_looks_like_now(metrics: Metrics) -> None:
    found = values(metrics)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 6, "those whose memory is in swap wait as well"
    assert found["vllm:num_requests_waiting_by_reason[('reason', 'capacity')]"] == 6
    assert (found["pagewalk_queue_tokens"], found["pagewalk_queue_wait_seconds"]) == (30, 4)
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["vllm:num_preemptions_total"] == 7
    assert found["pagewalk_kv_bytes[('tier', 'host')]"] == (100 + 40) * 1024, (
        "on the CPU the pool is in host memory, too"
    )
    assert found["pagewalk_kv_bytes[('tier', 'gpu')]"] == 0
    assert found["pagewalk_graph_steps_total[('graph', 'hit')]"] == 9
    assert found["pagewalk_graph_steps_total[('graph', 'miss')]"] == 4
    assert found["pagewalk_activations_peak_bytes"] == 777
    kinds = {"alloc": 30, "free": 5, "evict": 6, "refault": 2, "cow": 1, "swap_in": 3, "swap_out": 4}
    assert {kind: found[f"pagewalk_kv_events_total[('kind', '{kind}')]"] for kind in kinds} == kinds
    stalled = "pagewalk_kv_pressure_stall_seconds_total[('kind', '%s')]"
    assert (found[stalled % "some"], found[stalled % "full"]) == (2.5, 0.25)
    states = {"free": 60, "cached": 12, "active": 25, "copying": 3}
    assert {state: found[f"pagewalk_kv_frames[('state', '{state}')]"] for state in states} == states
    assert sum(value for name, value in found.items() if name.startswith("pagewalk_kv_frames")) == 100
    assert (found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]) == (640, 96)
    assert found["pagewalk_readmitted_tokens_total[('state', 'cached')]"] == 32
    assert found["pagewalk_readmitted_tokens_total[('state', 'computed')]"] == 18


def test_the_bytes_of_a_gpu_server_are_in_both_tiers() -> None:
    metrics = Metrics("1.2.3")
    metrics.serve(served(tier="gpu", prefix_caching=False))
    found = values(metrics)
    assert found["pagewalk_kv_bytes[('tier', 'gpu')]"] == 100 * 1024
    assert found["pagewalk_kv_bytes[('tier', 'host')]"] == 40 * 1024
    assert any(
        name.startswith("vllm:cache_config_info") and "('enable_prefix_caching', 'False')" in name for name in found
    )


def test_a_step_is_counted(metrics: Metrics) -> None:
    metrics.step_ended(REPORT)
    found = values(metrics)
    assert found["vllm:generation_tokens_total"] == 4
    assert found["vllm:iteration_tokens_total_sum"] == 103
    assert found["vllm:inter_token_latency_seconds_count"] == 3, "first tokens have no gap"
    assert found["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.044)
    assert found["vllm:inter_token_latency_seconds_bucket[('le', '0.004')]"] == 1
    assert found["vllm:inter_token_latency_seconds_bucket[('le', '0.025')]"] == 3
    assert found["pagewalk_step_seconds_sum[('phase', 'wait')]"] == 0.01


def test_a_step_of_first_tokens_only_has_no_gaps(metrics: Metrics) -> None:
    metrics.step_ended(replace(REPORT, gaps_s=np.array([np.nan])))
    assert values(metrics)["vllm:inter_token_latency_seconds_count"] == 0


def test_the_end_of_a_sequence_is_counted(metrics: Metrics) -> None:
    metrics.sequence_ended(sequence(), Ended(1, "stop", output_tokens=11, cached_tokens=16), now=4.0)
    found = values(metrics)
    assert found["vllm:request_success_total[('finished_reason', 'stop')]"] == 1
    assert found["vllm:request_success_total[('finished_reason', 'length')]"] == 0
    sums = {
        "time_to_first_token_seconds": 1.0,
        "request_queue_time_seconds": 0.5,
        "e2e_request_latency_seconds": 3.0,
        "request_inference_time_seconds": 2.5,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_time_per_output_token_seconds": 0.2,
        "request_generation_tokens": 11,
    }
    assert {name: found[f"vllm:{name}_sum"] for name in sums} == pytest.approx(sums)


def test_a_prompt_counts_once_however_many_choices_it_has(metrics: Metrics) -> None:
    metrics.http.prompt_ended(PromptNumbers(6, 40, 16, max_tokens=100, longest_output=11, is_answered=True))
    metrics.http.prompt_ended(PromptNumbers(1, 20, 0, max_tokens=5, longest_output=0, is_answered=False))
    found = values(metrics)
    assert (found["vllm:prompt_tokens_total"], found["vllm:prompt_tokens_cached_total"]) == (40, 16)
    assert found["vllm:request_params_n_bucket[('le', '5.0')]"] == 1
    assert (found["vllm:request_params_n_sum"], found["vllm:request_params_n_count"]) == (7, 2)
    sums = {"request_prompt_tokens": 60, "request_params_max_tokens": 105, "request_max_num_generation_tokens": 11}
    assert {name: found[f"vllm:{name}_sum"] for name in sums} == sums


def test_sequences_that_never_ran_have_no_times_of_running(metrics: Metrics) -> None:
    metrics.sequence_ended(sequence(admitted_s=None, first_token_s=None), Ended(1, "abort"), now=4.0)
    metrics.sequence_ended(sequence(first_token_s=None), Ended(2, "abort"), now=4.0)
    found = values(metrics)
    assert found["vllm:request_success_total[('finished_reason', 'abort')]"] == 2
    assert found["vllm:request_queue_time_seconds_count"] == 1
    assert found["vllm:time_to_first_token_seconds_count"] == 0


def test_http_requests_are_counted_with_bounded_labels(metrics: Metrics) -> None:
    for method in ("POST", "BREW", "FETCH"):
        metrics.http.http_started()
        metrics.http.http_ended("/v1/completions", method, 200)
    metrics.http.http_started()
    found = values(metrics)
    assert found["pagewalk_http_inflight"] == 1
    route = ("route", "/v1/completions")
    assert found[f"pagewalk_http_requests_total{[('method', 'other'), route, ('status', '200')]}"] == 2


def test_openmetrics_where_it_is_asked_for(metrics: Metrics) -> None:
    metrics.step_ended(REPORT)
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0,text/plain;q=0.5")
    assert content_type.startswith("application/openmetrics-text")
    text = body.decode()
    names = {sample.name for family in parse_openmetrics(text) for sample in family.samples}
    assert names >= {name.partition("[")[0] for name in values(metrics)}, "a scraper that asks for it finds all series"
    assert "\nvllm:num_requests_running{" in text


@pytest.mark.parametrize(
    "accept", ["*/*", "application/openmetrics-text; version=x", "text/plain; version=9.x.y", ";;,"]
)
def test_any_accept_header_gets_an_answer(metrics: Metrics, accept: str) -> None:
    assert metrics.render(accept)[0]


def test_token_buckets_end_at_the_longest_sequence(metrics: Metrics) -> None:
    bounds = [name for name in values(metrics) if name.startswith("vllm:request_prompt_tokens_bucket")]
    assert bounds[-2:] == [f"vllm:request_prompt_tokens_bucket[('le', '{bound}')]" for bound in ("5000.0", "+Inf")]


@pytest.mark.parametrize("value", [0.0, 0.0005, 0.00051, 0.3, 80, 81, 1e9])
def test_many_observations_count_as_one_by_one(value: float) -> None:
    one, many = Histogram(TOKEN_GAP_S), Histogram(TOKEN_GAP_S)
    for _ in range(3):
        one.observe(value)
    many.observe_all(np.full(3, value))
    assert one.counts == many.counts
    assert math.isclose(one.sum, many.sum)
    assert one.buckets()[-1] == ("+Inf", 3)


async def test_a_blocked_event_loop_is_seen(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop gets to the probe late by what a handler took: here by a clock that jumps."""
    loop = asyncio.get_running_loop()
    now = [100.0]
    monkeypatch.setattr(loop, "time", lambda: now[0])

    async def sleep(seconds: float) -> None:
        if now[0] > 101:
            raise asyncio.CancelledError
        now[0] += seconds + 1.5

    monkeypatch.setattr("service.http_counts.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await metrics.http.watch_loop()
    assert values(metrics)["pagewalk_event_loop_lag_seconds_sum"] == 1.5
