"""Every workload that a peer's numbers exist for, one process a network, one table.

    python -m bench.peers --out FOLDER [--shapes smol,qwen06b,8b] [--repeat 3]
    python -m bench.peers --drawn FILE.json ... --plot FILE.svg      a picture of earlier results; later files win

Peers: vLLM 0.22.1 at its defaults, measured on an H200 on 2026-11-29 with the same workloads: offline, random bf16
weights, greedy unless said otherwise, ignore_eos, all requests at once. "Floor" is bench/floor.py. Prints a table in
Markdown; FOLDER gets peers.json (every result whole), peers.md and peers.svg.
"""

import argparse
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop

from bench import floor, offline
from bench.pictures import COLOURS, PEER, pyplot, save


@dataclass(frozen=True)
class Row:
    """One throughput measurement, and the peer's seconds (the better of its runs)."""

    shape: str
    workload: str
    sampling: str  # "greedy" or "temperature,top_k,top_p"
    vllm_s: float

    @property
    def name(self) -> str:
        return f"{self.shape} {self.workload}" + ("" if self.sampling == "greedy" else f", sampled {self.sampling}")

    @property
    def label(self) -> str:
        """The name for people."""
        return f"{NETWORKS[self.shape]}, {self.workload}" + ("" if self.sampling == "greedy" else ", sampled")


ROWS = [
    Row("smol", "chat-1000", "greedy", 17.03),
    Row("smol", "chat-1000", "0.8,50,0.95", 21.86),
    Row("smol", "instruct-1000", "greedy", 3.33),
    Row("qwen06b", "chat-1000", "greedy", 15.75),
    Row("qwen06b", "instruct-1000", "greedy", 3.08),
    Row("8b", "chat-1000", "greedy", 27.58),
    Row("8b", "chat-1000", "0.8,50,0.95", 31.01),
    Row("8b", "shared-prefix-512", "greedy", 6.25),
    Row("8b", "parallel-n6-200", "1.0,0,1.0", 17.42),
    Row("8b", "long-context-32", "greedy", 33.37),
]
NETWORKS = {"smol": "SmolLM2-135M", "qwen06b": "Qwen3-0.6B", "8b": "Llama-3.1-8B"}
VLLM_MS_A_TOKEN = {"smol": 1.84, "qwen06b": 2.44, "8b": 4.97}
VLLM_FIRST_MS = {"8b": {"128": 12.1, "512": 16.2, "2048": 52.6, "8192": 218.5}}


def arguments(shape: str, repeat: int) -> argparse.Namespace:
    """What `pagewalk bench` would have parsed."""
    lengths = "128,512,2048" if shape == "smol" else "128,512,2048,8192"
    return offline.command_line().parse_args(
        ["throughput", "--shape", shape, "--repeat", str(repeat), "--prompt-lens", lengths]
    )


async def measure(shape: str, repeat: int) -> list[dict[str, Any]]:
    """All of one network's rows, its latency, and its steady decode (the small network only)."""
    args = arguments(shape, repeat)
    results = []
    async with offline.started(args) as (runner, facts):
        for row in [row for row in ROWS if row.shape == shape]:
            args.workload, args.prefix_cache = row.workload, row.workload.startswith("shared-prefix")
            args.temperature, args.top_k, args.top_p = 0.0, 0, 1.0
            if row.sampling != "greedy":
                temperature, top_k, top_p = row.sampling.split(",")
                args.temperature, args.top_k, args.top_p = float(temperature), int(top_k), float(top_p)
            args.repeat = 1 if shape == "8b" and row.vllm_s > 10 else repeat
            results.append({"name": row.name, **facts, **await offline.throughput(runner, args)})
            print(f"{row.name}: {results[-1]['seconds']} s", flush=True)
        args.repeat = 3
        results.append({"name": f"{shape} latency", **facts, **await offline.latency(runner, args)})
        if shape == "smol":
            results.append({"name": f"{shape} steady", **facts, **await offline.steady(runner, args)})
    return results


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| workload | pagewalk s | vLLM s | times faster | floor s | output tok/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        if (result := results.get(row.name)) is None:
            continue
        rows = [
            json.loads(line)
            for line in Path(floor.__file__).with_name("workloads").joinpath(f"{row.workload}.jsonl").open()
        ]
        least, _, _ = floor.replay(rows, row.shape, floor.Rates(), max_seqs=1024, budget=8192)
        seconds = result["seconds"]
        cells = (row.name, f"{seconds:.2f}", row.vllm_s, f"{row.vllm_s / seconds:.2f}", f"{least:.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} | {result['output_tok_s']:,.0f} |")
    lines += ["", "| one stream | pagewalk | vLLM |", "| --- | --- | --- |"]
    for shape, vllm_ms in VLLM_MS_A_TOKEN.items():
        if (result := results.get(f"{shape} latency")) is None:
            continue
        lines.append(f"| {shape}, ms a token | {result['ms_a_token']:.3f} | {vllm_ms} |")
        for length, ms in result["first_token_ms"].items():
            lines.append(
                f"| {shape}, first token of {length}, ms | {ms:.2f} | {VLLM_FIRST_MS.get(shape, {}).get(length, '')} |"
            )
    if (result := results.get("smol steady")) is not None:
        lines += [
            "",
            "| steady decode, smol | step us | schedule + submit + commit us | device idle |",
            "| --- | --- | --- | --- |",
        ]
        for sequences, steady in result["sequences"].items():
            host = sum(steady["host_us"][part]["p50"] for part in ("schedule", "submit", "commit"))
            lines.append(
                f"| {sequences} sequences | {steady['step_us']} | {host:.0f} | {steady.get('idle_share', 0):.1%} |"
            )
    return "\n".join(lines)


def newest(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Name -> result with its commit, of files as `main` writes them; what a later file has wins."""
    records = [json.loads(file.read_text()) for file in files]
    return {
        result["name"]: {"commit": record["commit"], **result} for record in records for result in record["results"]
    }


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Bars: seconds beside the peer's."""
    plt = pyplot()
    rows = [row for row in ROWS if row.name in results]
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(rows) + 1))
    seconds = {"Pagewalk": [results[row.name]["seconds"] for row in rows], PEER: [row.vllm_s for row in rows]}
    for kind, (whose, values) in enumerate(seconds.items()):
        places = [place + 0.4 * kind - 0.2 for place in range(len(rows))]
        axes.bar_label(axes.barh(places, values, 0.38, label=whose, color=COLOURS[whose]), fmt="%.2f", padding=3)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_title("Seconds on one H200, all requests at once (shorter is better)", fontsize=11)
    axes.legend()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drawn", type=Path, nargs="+", metavar="FILE", help="measure nothing, draw these results")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where --drawn draws")
    parser.add_argument("--shapes", default="smol,qwen06b,8b")
    parser.add_argument("--shape", help=argparse.SUPPRESS)  # of the child process
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--commit", default="unknown", help="what was measured, for the record")
    args = parser.parse_args()
    if args.drawn:
        plot(newest(args.drawn), args.plot)
        return
    if args.shape:
        results = uvloop.run(measure(args.shape, args.repeat))
        (args.out / f"{args.shape}.json").write_text(json.dumps(results))
        return
    found: dict[str, dict[str, Any]] = {}
    for shape in args.shapes.split(","):
        command = [
            "python3",
            "-m",
            "bench.peers",
            "--out",
            str(args.out),
            "--shape",
            shape,
            "--repeat",
            str(args.repeat),
        ]
        subprocess.run(command, check=False)
        part = args.out / f"{shape}.json"
        if part.exists():
            found |= {result["name"]: result for result in json.loads(part.read_text())}
            part.unlink()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    record = {"device": device, "torch": torch.__version__, "commit": args.commit, "results": list(found.values())}
    (args.out / "peers.json").write_text(json.dumps(record, indent=1))
    (args.out / "peers.md").write_text(table(found) + "\n")
    plot(found, args.out / "peers.svg")
    print(table(found))


if __name__ == "__main__":
    main()
