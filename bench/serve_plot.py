"""Pictures of `bench.serve`: times to the first token and between tokens against the rate of arrivals, beside vLLM's.

The peer's figures: vLLM 0.22.1 `serve` at its defaults on one H200, 2026-11-29, with bench/loadgen.py on its loopback:
chat-1000, greedy, prompts as token ids, prefix cache off, each row measured once.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bench.pictures import COLOURS, PEER, pyplot, save

Times = Literal["ttft_ms", "tpot_ms"]


class PeerRow(NamedTuple):
    """One run of the peer: arrivals a second, and milliseconds (p50, p99)."""

    rate: float
    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]


VLLM = {
    "8b": [
        PeerRow(8, (20.2, 50.2), (5.45, 5.98)),
        PeerRow(16, (25.9, 65.8), (6.04, 6.72)),
        PeerRow(24, (32.0, 78.9), (6.73, 7.78)),
        PeerRow(32, (47.7, 115.7), (8.04, 9.68)),
    ],
    "smol": [PeerRow(50, (313, 624), (18.0, 32.7)), PeerRow(100, (3_090, 9_019), (10.9, 14.5))],
}
TITLES: dict[Times, str] = {"ttft_ms": "first token", "tpot_ms": "time per output token"}

Line = list[tuple[float, float]]
"""Points: arrivals a second, milliseconds."""


def lines(results: Iterable[Mapping[str, Any]], shape: str, times: Times) -> dict[tuple[str, str], Line]:
    """(whose, "p50" or "p99") -> its points, for runs with a rate; without the peer's if none is known."""
    found: dict[tuple[str, str], Line] = {}
    paced = [(each["rate"], each[times]) for each in results if isinstance(each["rate"], float)]
    paced.sort(key=lambda run: run[0])
    for place, part in enumerate(("p50", "p99")):
        found["Pagewalk", part] = [(rate, each[part]) for rate, each in paced]
        if shape in VLLM:
            found[PEER, part] = [(row.rate, getattr(row, times)[place]) for row in VLLM[shape]]
    return found


def plot(results: Iterable[Mapping[str, Any]], shape: str, path: Path) -> None:
    """Needs matplotlib (the extra `plot`). shape: whose peers are drawn, also a name that none is known for."""
    plt = pyplot()
    results = list(results)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for axis, times in zip(axes, TITLES, strict=True):
        drawn = lines(results, shape, times)
        for (whose, part), points in drawn.items():
            style = "-" if part == "p50" else "--"
            rates, heights = [rate for rate, _ in points], [ms for _, ms in points]
            axis.plot(rates, heights, style, marker="o", ms=4, label=f"{whose}, {part}", color=COLOURS[whose])
        shown = [ms for points in drawn.values() for _, ms in points]
        if shown and max(shown) > 30 * min(shown):
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, 1.25 * max(shown, default=1))  # room for the legend
        axis.set(title=f"{TITLES[times]}, {shape}", xlabel="requests a second", ylabel="ms")
        axis.legend(fontsize=8)
    save(figure, path)
