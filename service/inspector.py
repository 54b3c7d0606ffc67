"""Puts all views together that the engine's process answers operators with."""

from collections.abc import Mapping
from functools import partial

from service.admin_sequences import SEQUENCE_VIEWS
from service.admin_trace import TRACE_VIEWS, pulse_of
from service.admin_views import MEMORY_VIEWS, Inside, Inspector
from service.metrics import Metrics
from service.process_views import process_views
from service.settings import Origin, Settings


def inspector(inside: Inside, metrics: Metrics, settings: Settings, origins: Mapping[str, Origin]) -> Inspector:
    """Of one engine, in a process that was started with these settings."""
    views = MEMORY_VIEWS | SEQUENCE_VIEWS | TRACE_VIEWS | process_views(settings, origins)
    views["pulse"] = pulse_of(metrics.latencies)
    return Inspector(inside, views, partial(metrics.looked, "views"))
