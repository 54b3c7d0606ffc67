"""The course of a mix, second by second: as JSON, and as a picture.

python tests/support/soak_record.py soak.json soak.svg       (needs matplotlib)
"""

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MOST_GROWTH = 0.05
"""Of the engine's resident memory over the second half of a life, by its slope: what an allocator keeps."""

POINTS = 160
"""Of a line in the picture."""

COLOURS = {"engine": "#2f6f9f", "front end 0": "#c07830", "front end 1": "#d8b060", "clients": "#a0a0a0"}


@dataclass
class Record:
    """Samples of all lives of the server, in order; counts begin at 0 with each life."""

    began_s: float = field(default_factory=time.monotonic)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, life: str, happened: Counter[str], audit: Any, counters: Any, swap: Any, resident: dict[str, int]
    ) -> None:
        """What the admin endpoint says, and bytes by process."""
        sample = {"s": round(time.monotonic() - self.began_s, 1), "life": life, "slots": swap["used"]}
        sample |= {name: happened[name] for name in ("answers", "audits")}
        sample |= {name: audit[name] for name in ("total", "free", "cached", "active")}
        sample |= {name: counters[name] for name in ("swap_in", "swap_out", "preempt")}
        self.samples.append(sample | {"resident": resident})

    def growth(self, life: str) -> tuple[float, float]:
        """MiB a minute by which the engine's resident memory grows in the second half of a life (least squares), and
        the share of it that this is over that half. (0, 0) of a life too short to tell."""
        samples = [sample for sample in self.samples if sample["life"] == life]
        half = samples[len(samples) // 2 :]
        if len(half) < 5:
            return 0.0, 0.0
        seconds, sizes = np.array([(sample["s"], sample["resident"]["engine"]) for sample in half]).T
        slope = float(np.polyfit(seconds - seconds[0], sizes, 1)[0])
        return slope * 60 / 2**20, slope * (seconds[-1] - seconds[0]) / sizes.mean()


def lines(samples: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By name, POINTS values at most: counts go on over lives, sizes in MiB, shares of the pool in percent."""
    found: dict[str, list[float]] = {"minutes": [sample["s"] / 60 for sample in samples]}
    for name in ("answers", "audits", "swap_in", "swap_out", "preempt"):
        before, last, values = 0, 0, []
        for sample, previous in zip(samples, [None, *samples], strict=False):
            if previous is not None and sample["life"] != previous["life"]:
                before += last
            last = sample[name]
            values.append(before + last)
        found[name] = values
    for name in ("active", "cached"):
        found[name] = [100 * sample[name] / sample["total"] for sample in samples]
    found |= {name: [sample[name] for sample in samples] for name in ("total", "slots")}
    for name in COLOURS:
        found[name] = [sample["resident"].get(name, float("nan")) / 2**20 for sample in samples]
    every = -(-len(samples) // POINTS)
    return {name: values[::every] for name, values in found.items()}


def plot(samples: list[dict[str, Any]], path: Path) -> None:
    """Five rows over one time; needs matplotlib."""
    import matplotlib  # only here: a mix without a picture needs none

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    import matplotlib.pyplot as plt

    drawn = lines(samples)
    x = drawn["minutes"]
    figure, (answers, moves, pool, slots, memory) = plt.subplots(5, 1, figsize=(9, 9), sharex=True)
    answers.plot(x, drawn["answers"], color="#2f6f9f", label="answers, each as alone")
    answers.plot(x, drawn["audits"], color="#909090", label="audits, each balanced")
    for name, label in (("preempt", "preemptions"), ("swap_out", "pages swapped out"), ("swap_in", "pages swapped in")):
        moves.plot(x, drawn[name], label=label)
    pool.stackplot(x, drawn["active"], drawn["cached"], labels=["active", "cached"], colors=["#2f6f9f", "#a8c8dc"])
    pool.set(ylim=(0, 100), ylabel="% of frames")
    slots.plot(x, drawn["total"], color="#909090", label="frames in the pool (resized while running)")
    slots.plot(x, drawn["slots"], color="#c07830", label="swap slots used")
    for name, colour in COLOURS.items():
        memory.plot(x, drawn[name], color=colour, label=name)
    memory.set(ylabel="resident MiB", ylim=(0, None), xlabel="minutes")
    begins = {sample["life"]: sample["s"] / 60 for sample in reversed(samples)}
    for name, minute in begins.items():
        answers.text(minute, 0, f" {name}", fontsize=7, rotation=90, va="bottom", ha="right")
    for axis in (answers, moves, pool, slots, memory):
        axis.legend(fontsize=7, loc="upper left")
        for minute in begins.values():
            axis.axvline(minute, color="#c0c0c0", lw=0.8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text())["samples"], Path(sys.argv[2]))
