"""Asks a path over and over, from a process of its own: what it measures is the server, and not the crowd beside it.

python prober.py PORT PATH EVERY_S: each time over a new connection, until SIGTERM; then one line of JSON.
"""

import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any


def start(port: int, path: str, every_s: float) -> subprocess.Popen[bytes]:
    """A process that asks until it is terminated; its output is what `probe` found."""
    return subprocess.Popen([sys.executable, __file__, str(port), path, str(every_s)], stdout=subprocess.PIPE)


def probe(port: int, path: str, every_s: float) -> dict[str, Any]:
    """Statuses by count, and times in ms, of which `connecting` until the connection stood."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    with suppress(PermissionError):
        os.nice(-10)  # the crowd beside it must not be what it waits for
    statuses: dict[int, int] = {}
    whole, connecting = [], []
    while not ended:
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.connect()
        connecting.append((time.perf_counter() - began) * 1e3)
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        whole.append((time.perf_counter() - began) * 1e3)
        connection.close()
        statuses[response.status] = statuses.get(response.status, 0) + 1
        time.sleep(every_s)
    quantiles = statistics.quantiles(whole, n=100, method="inclusive") if len(whole) > 1 else whole * 99
    times = {"median": quantiles[49], "p99": quantiles[98], "max": max(whole), "max connecting": max(connecting)}
    return {"statuses": statuses, "ms": {name: round(value, 1) for name, value in times.items()}}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))))
