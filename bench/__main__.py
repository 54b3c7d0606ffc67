"""The command `pagewalk bench NAME`: one module of this package a name.

throughput, latency, steady,
gaps                          the engine without HTTP (bench/offline.py)
start                         how long a server takes until it is ready
serve                         the whole server under load over HTTP
first-token                   requests one at a time, servers of several checkouts turn about
front-end                     what a front end costs, with an engine that computes nothing
kernels                       the CUDA kernels alone
thin                          the products of few rows, beside cuBLAS
swap                          copies to host memory, and a workload in a pool that is too small
peers                         every workload that a peer's numbers exist for, in one table
cpu                           the whole server beside transformers, on the CPU
mm                            the memory manager alone, beside transformers' paged cache
long_run                      a mixed load for minutes or hours: what must not grow does not
simulate                      a workload replayed against memory: waste, sharing, swap over time
"""

import importlib
import sys

OFFLINE = ("throughput", "latency", "steady", "gaps")
MODULES = (
    "start",
    "serve",
    "first-token",
    "front-end",
    "kernels",
    "thin",
    "swap",
    "peers",
    "cpu",
    "mm",
    "long_run",
    "simulate",
)


def main(arguments: list[str]) -> int:
    """Run one benchmark; returns the exit code."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name not in OFFLINE + MODULES:
        print(f"{__doc__}\n`pagewalk bench NAME --help` lists a benchmark's flags.", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    module = importlib.import_module(f"bench.{'offline' if name in OFFLINE else name.replace('-', '_')}")
    sys.argv = [f"pagewalk bench {name}", *([name] if name in OFFLINE else []), *rest]
    module.main()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
