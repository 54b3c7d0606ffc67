"""Puts all views together that the engine's process answers operators with."""

from service.admin_sequences import SEQUENCE_VIEWS
from service.admin_trace import TRACE_VIEWS, pulse_of
from service.admin_views import MEMORY_VIEWS, Inside, Inspector
from service.metrics import Metrics


def inspector(inside: Inside, metrics: Metrics) -> Inspector:
    """Of one engine."""
    views = MEMORY_VIEWS | SEQUENCE_VIEWS | TRACE_VIEWS | {"pulse": pulse_of(metrics.latencies)}
    return Inspector(inside, views)
