"""How the benchmarks' pictures are drawn: SVG with text as text, and nothing in it that differs from run to run."""

from pathlib import Path
from types import ModuleType
from typing import Any

PEER = "vLLM 0.22.1"
COLOURS = {"Pagewalk": "#2f6f9f", PEER: "#a0a0a0"}


def pyplot() -> ModuleType:
    """matplotlib's (the extra `plot`)."""
    import matplotlib  # only here: a benchmark without a picture needs none

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "pagewalk", "font.family": "sans-serif"})
    plt.rcParams["font.sans-serif"] = ["Helvetica", "Arial", "DejaVu Sans"]
    return plt


def save(figure: Any, path: Path, foot: float = 0.0) -> None:
    """Equal pictures are equal files. foot: the share of the height that is left for a legend below."""
    figure.tight_layout(rect=(0, foot, 1, 1))
    figure.savefig(path, metadata={"Date": None})
