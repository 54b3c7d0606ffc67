"""The facts of views as text, in the layout that the kernel gives the same: for people, grep and awk.

Each takes the facts of one view as its JSON has them, so that both always agree.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tomli_w

Facts = Mapping[str, Any]


def by_name(facts: Facts) -> str:
    """/proc/vmstat: a name and a value a line."""
    return "".join(f"{name} {_word(value)}\n" for name, value in _own(facts).items())


def by_path(facts: Facts, path: str = "") -> str:
    """The same where facts stand within others: `frames.free 12`."""
    lines = []
    for name, value in _own(facts).items():
        within = isinstance(value, Mapping)
        lines.append(by_path(value, f"{path}{name}.") if within else f"{path}{name} {_word(value)}\n")
    return "".join(lines)


def _own(facts: Facts) -> dict[str, Any]:
    """Without the head that every answer has."""
    return {name: value for name, value in facts.items() if name not in ("ts", "step", "uptime_s")}


def pressure(facts: Facts) -> str:
    """/proc/pressure/memory."""
    lines = []
    for kind in ("some", "full"):
        line = facts[kind]
        averages = " ".join(f"{name}={line[name]:.2f}" for name in ("avg10", "avg60", "avg300"))
        lines.append(f"{kind} {averages} total={line['total_us']}\n")
    return "".join(lines)


def buddyinfo(facts: Facts) -> str:
    """/proc/buddyinfo."""
    return f"Node 0, zone {'KV':>8} " + "".join(f"{count:6d} " for count in facts["free_runs"]) + "\n"


def zoneinfo(facts: Facts) -> str:
    """/proc/zoneinfo."""
    names = ("min", "low", "high", "present", "managed")
    lines = [f"Node 0, zone {'KV':>8}", f"  pages free     {facts['free']}"]
    return "\n".join([*lines, *(f"        {name:<8} {facts[name]}" for name in names)]) + "\n"


def pools(facts: Facts) -> str:
    """/proc/slabinfo. A pool is one slab."""
    lines = [
        "slabinfo - version: 2.1",
        "# name            <active_objs> <num_objs> <objsize> <objperslab> <pagesperslab> : tunables <limit> "
        "<batchcount> <sharedfactor> : slabdata <active_slabs> <num_slabs> <sharedavail>",
    ]
    for pool in facts["pools"]:
        active, total, size = pool["active_objs"], pool["num_objs"], pool["obj_bytes"]
        slabs = f"{total:4d} {1:4d} : tunables    0    0    0 : slabdata      1      1      0"
        lines.append(f"{pool['name']:<17} {active:6d} {total:6d} {size:6d} {slabs}")
    return "\n".join(lines) + "\n"


def swaps(facts: Facts) -> str:
    """/proc/swaps, in KiB."""
    size, used = (facts[name] * facts["slot_bytes"] // 1024 for name in ("total", "used"))
    head = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
    if not facts["total"]:
        return head
    return head + f"{'host-memory':<40}{'ram':<16}{size}\t\t{used}\t\t-1\n"


def table(rows: Sequence[Facts], columns: Mapping[str, str]) -> str:
    """ps: a head, and a line for each; columns: heading -> name of the fact. The first and the last lean left."""
    cells = [list(columns)] + [[_cell(row[name]) for name in columns.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    last = len(columns) - 1
    lines = (
        "  ".join(
            cell.ljust(widths[i]) if i in (0, last) else cell.rjust(widths[i]) for i, cell in enumerate(line)
        ).rstrip()
        for line in cells
    )
    return "\n".join(lines) + "\n"


def _word(value: object) -> str:
    """true and false as JSON has them."""
    if value is None or value == "":
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else _word(value)


def ps(facts: Facts) -> str:
    """Sequences, then the holders that are none."""
    columns = {
        "ID": "id", "STATE": "state", "WAITS-FOR": "wait_reason", "TENANT": "tenant", "AGE": "age_s",
        "TTFT-MS": "ttft_ms", "PROMPT": "prompt_tokens", "CACHED": "cached_tokens", "OUTPUT": "output_tokens",
        "MAX": "max_tokens", "RSS": "rss", "PSS": "pss", "SWAP": "swap", "PREEMPT": "preemptions", "CLIENT": "client",
        "REQUEST": "request",
    }  # fmt: skip
    blank = dict.fromkeys(columns.values())
    others = [
        blank | {"id": each["id"].replace(" ", "-"), "state": "holder", "tenant": each["tenant"]}
        | {"rss": each["rss"], "pss": each["pss"], "request": each["owner"]}
        for each in facts["holders"]
    ]  # fmt: skip
    return table([*facts["sequences"], *others], columns)


def status(facts: Facts) -> str:
    """/proc/PID/status."""
    return "".join(f"{_title(name)}:\t{_cell(value)}\n" for name, value in _own(facts).items())


def _title(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def maps(facts: Facts) -> str:
    """/proc/PID/maps: hexadecimal token positions, flags, offset, device, inode, origin."""
    device = {"frame": "00:00", "swap": "00:01"}
    return "".join(
        f"{run['start']:08x}-{run['end']:08x} {run['flags'][:2]}-{run['flags'][-1]} {0:08x} {device[run['place']]} 0"
        f"{'':20}[{run['origin']}{':' + run['hash'] if run['hash'] else ''}]\n"
        for run in facts["runs"]
    )


def smaps(facts: Facts) -> str:
    """/proc/PID/smaps_rollup; the unit is the frame."""
    head = f"{0:08x}-{facts['tokens']:08x} ---p 00000000 00:00 0{'':20}[rollup]\n"
    names = {
        "Rss": "rss", "Pss": "pss", "Shared_Clean": "shared_clean", "Private_Dirty": "private_dirty",
        "Referenced": "referenced", "Swap": "swap", "Committed": "committed",
    }  # fmt: skip
    lines = (f"{title + ':':<16}{_cell(facts[name]):>10} frames\n" for title, name in names.items())
    return head + "".join(lines) + f"{'Waste:':<16}{facts['waste_tokens']:>10} tokens\n"


def pagemap(facts: Facts) -> str:
    """A page a line."""
    return table(
        facts["pages"],
        {"PAGE": "page", "TIER": "tier", "NUMBER": "number", "REFS": "references", "TOKENS": "tokens", "HASH": "hash"},
    )


def trace(facts: Facts) -> str:
    """/sys/kernel/tracing/trace."""
    lines = ["# tracer: nop", "#", "#           REQUEST-STEP     [TENANT]       TIMESTAMP: EVENT: place count"]
    return "\n".join((*lines, *map(trace_line, facts["events"]))) + "\n"


def trace_line(event: Facts) -> str:
    """One event."""
    task = f"{event['request'] or '-':>19}-{event['step']:<8}"
    what = f"{event['event']}: place={event['place']} count={event['count']}"
    return f"{task} [{event['tenant']}] {event['ts']:.3f}: {what}"


def tenant(facts: Facts) -> str:
    """Every file of a tenant's cgroup: its name, then what it says, as `head` shows several files."""
    return "\n".join(f"==> {name} <==\n{content}" for name, content in tenant_files(facts).items())


def tenants(facts: Facts) -> str:
    return table(
        facts["tenants"],
        {
            "TENANT": "name", "CURRENT": "current", "PEAK": "peak", "MIN": "min", "LOW": "low", "HIGH": "high",
            "MAX": "max", "SWAP": "swap_current", "SWAPMAX": "swap_max", "WEIGHT": "weight",
        },
    )  # fmt: skip


def tenant_files(facts: Facts) -> dict[str, str]:
    """The files of a cgroup v2, each with its content. In frames and slots."""
    limits = {name: facts[name] for name in ("min", "low", "high", "max")}
    files = {f"memory.{name}": f"{'max' if value is None else value}\n" for name, value in limits.items()}
    swap_max = "max" if facts["swap_max"] is None else facts["swap_max"]
    return files | {
        "memory.current": f"{facts['current']}\n",
        "memory.peak": f"{facts['peak']}\n",
        "memory.swap.current": f"{facts['swap_current']}\n",
        "memory.swap.max": f"{swap_max}\n",
        "memory.events": by_name(facts["events"]),
        "memory.stat": by_name(facts["stat"]),
        "memory.pressure": pressure(facts["pressure"]),
    }


def oom_score(facts: Facts) -> str:
    return table(
        facts["candidates"],
        {
            "ID": "id", "SCORE": "score", "ADJ": "oom_score_adj", "FRAMES": "frames", "SWAP-MS": "swap_ms",
            "RECOMPUTE-MS": "recompute_ms", "ACTION": "action", "NEXT": "is_next", "REQUEST": "request",
        },
    )  # fmt: skip


def scheduler(facts: Facts) -> str:
    names = ("waiting", "running", "swapped", "max_running", "max_batched_tokens", "has_place")
    head = by_name({name: facts[name] for name in names})
    columns = {
        "ID": "id",
        "REASON": "reason",
        "AGE": "age_s",
        "TOKENS": "tokens",
        "TENANT": "tenant",
        "REQUEST": "request",
    }
    return head + "\n" + table(facts["queue"], columns)


def misses(facts: Facts) -> str:
    return table(
        facts["misses"],
        {
            "ID": "id", "REASON": "reason", "PROMPT": "prompt_tokens", "CACHED": "cached_tokens",
            "POSITION": "position", "TENANT": "tenant", "REQUEST": "request",
        },
    )  # fmt: skip


def page_cache(facts: Facts) -> str:
    """Cached pages; with ?prefix_of= those of one prompt, and the miss."""
    columns = {
        "HASH": "hash", "PLACE": "place", "HITS": "hits", "REFS": "references", "IDLE": "idle_s", "ACTIVE": "is_active",
        "TENANT": "tenant",
    }  # fmt: skip
    if "top" in facts:
        return table(facts["top"], {"HASH": "hash", "DEPTH": "depth_tokens", **columns})
    miss = facts["miss"]
    text = table(facts["found"], columns)
    return text + f"cached {facts['cached_tokens']} of {facts['tokens']} tokens; then {miss['reason']}\n"


def frames(facts: Facts) -> str:
    rows = [each | {"owners": ",".join(each["owners"])} for each in facts["frames"]]
    columns = {
        "FRAME": "frame", "STATE": "state", "REFS": "references", "TOKENS": "tokens", "USES": "uses",
        "TENANT": "tenant", "HASH": "hash", "OWNERS": "owners",
    }  # fmt: skip
    return table(rows, columns)


def frames_summary(facts: Facts) -> str:
    """Counts by state; then pg_buffercache_usage_counts."""
    lines = [f"frames_{name} {count}" for name, count in facts["frames"].items()]
    lines += [f"slots_{name} {count}" for name, count in facts["slots"].items()]
    columns = {"USES": "uses", "PAGES": "pages", "MAPPED": "mapped", "CLEAN": "clean"}
    return "\n".join(lines) + "\n\n" + table(facts["usage_counts"], columns)


def steps(facts: Facts) -> str:
    columns = {
        "STEP": "step", "MS": "ms", "PREFILL": "prefill_tokens", "DECODE": "decode_tokens", "BATCH": "batch",
        "RUNNING": "running", "SWAPPED": "swapped", "WAITING": "waiting", "MAPPED": "mapped_frames",
        "FREE": "free_frames", "EVICTED": "evictions", "GRAPH": "graph_hit",
    }  # fmt: skip
    return table(facts["steps"], columns)


def audit(facts: Facts) -> str:
    sums = {name: value for name, value in _own(facts).items() if name != "discrepancies"}
    return by_name(sums) + "".join(f"discrepancy {line}\n" for line in facts["discrepancies"])


def config(facts: Facts) -> str:
    """A file that --config reads, but for the secrets."""
    lines = []
    for setting in facts["settings"]:
        name, value, origin = setting["name"], setting["value"], setting["origin"]
        is_absent = value in (None, "***")
        lines.append(f"# {name}: {value or 'none'} ({origin})" if is_absent else f"{name} = {_toml(value)}  # {origin}")
    tables = f"\n{tomli_w.dumps({'tenants': facts['tenants']})}" if facts["tenants"] else ""
    return "\n".join(lines) + "\n" + tables


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # of strings, numbers and lists of them, JSON's form is TOML's too


def threads(facts: Facts) -> str:
    """ps -L."""
    columns = {"THREAD": "thread", "STATE": "state", "USER": "user_s", "SYSTEM": "system_s", "NAME": "name"}
    return table(facts["threads"], columns)


def stacks(facts: Facts) -> str:
    """A paragraph for each thread and task."""
    found = [("thread", each) for each in facts["threads"]] + [("task", each) for each in facts["tasks"]]
    return "\n".join("\n".join((f"{kind} {each['name']}:", *each["frames"], "")) for kind, each in found)


def profile(facts: Facts) -> str:
    """Collapsed stacks, as flame graphs are made from."""
    return "".join(f"{';'.join(each['stack'])} {each['samples']}\n" for each in facts["stacks"])


RENDERERS: dict[str, Callable[[Facts], str]] = {
    "vmstat": by_name,
    "pressure": pressure,
    "pressure/compute": pressure,
    "buddyinfo": buddyinfo,
    "zoneinfo": zoneinfo,
    "pools": pools,
    "audit": audit,
    "frames": frames,
    "frames/{of}": status,
    "frames/summary": frames_summary,
    "swaps": swaps,
    "page_cache": page_cache,
    "tenants": tenants,
    "tenants/{of}": tenant,
    "sequences": ps,
    "sequences/{of}/status": status,
    "sequences/{of}/maps": maps,
    "sequences/{of}/smaps": smaps,
    "sequences/{of}/pagemap": pagemap,
    "sequences/{of}/trace": trace,
    "scheduler": scheduler,
    "oom_score": oom_score,
    "misses": misses,
    "trace": trace,
    "steps": steps,
    "pulse": by_path,
    "config": config,
    "threads": threads,
    "stacks": stacks,
}
