"""What every process of the server asks of the system that it runs in."""

import gc
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

SPARE_FILES = 768
"""Open files beside those of requests that generate: listening sockets, probes, idle connections, and up to 128 new
connections an address for each turn of the loop between a request's arrival and its refusal.
"""


def allow_many_sockets() -> int | None:
    """Allow as many open files as this user may have: each request is one, and shells give 1,024.

    Returns how many requests may hold one: without spare files not even a probe could come in. None: no bound.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # not allowed after all: serve with what there is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return None if soft == resource.RLIM_INFINITY else max(soft - SPARE_FILES, soft // 2)


class UnjoinedThreads(ThreadPoolExecutor):
    """The threads of an event loop, whose end does not wait for what they do: a write to a disk that hangs, a long text
    to encode. The process ends by `os._exit` then.
    """

    def shutdown(self, *_: Any, **__: Any) -> None:
        super().shutdown(wait=False, cancel_futures=True)


COLLECT_AFTER = 10_000, 10, 100
"""New objects before the collector looks for cycles among them, and how many such looks before one at older objects. By
default 700, 10, 10: with thousands of streams that is several times a step, and a third of a front end's time. Requests
leave next to nothing in cycles (a beam search, a reader of calls). A look takes 0.1 to 0.4 us an object: 5,000 open
requests have 600,000, and with 50,000, 10, 10 all were looked at in one pause of 230 ms; now the longest is 54."""


def settle() -> None:
    """What was loaded stays: the collector need not look at it again, which would stop every stream for a while."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
