"""What public kernels take for the shapes of bench.kernels, and a picture of ours beside them.

Measured on 2026-11-29 on one H200 (torch 2.11, CUDA 13.0) in CUDA graphs over data larger than the L2: FlashAttention-3
over pages, FlashInfer with tensor cores over pages. bf16, 32 query heads, 8 of keys and values, head size 128.
"""

from pathlib import Path

from bench.pictures import COLOURS, pyplot, save

DECODE_US = {  # FlashAttention-3, FlashInfer
    "1 x 32,768": (42.3, 42.8),
    "8 x 8,192": (71.4, 72.6),
    "64 x 2,048": (135.1, 133.3),
    "256 x 1,024": (274.6, 262.9),
    "256 x 4,096": (991.6, 979.0),
    "64 ragged, 1..8,192": (276.1, 297.9),
}
PREFILL_TFLOPS = {
    "1 x 8,192": (636, 540),
    "8 x 2,048": (516, 436),
    "32 x 512": (286, 221),
    "2,048 new over 30,000": (657, 582),
}
PEERS = ("FlashAttention-3, paged", "FlashInfer, paged")
COLORS = ("#d0d0d0", "#a0a0a0", COLOURS["Pagewalk"])


def plot(results: dict[str, dict[str, float]], path: Path) -> None:
    """Two sets of bars: decode as a share of the time that reading its keys and values takes, prefill in TFLOP/s.

    results: of bench.kernels. Rows that it lacks are left out.
    """
    plt = pyplot()
    decodes = {name: results[f"decode {name}"] for name in DECODE_US if f"decode {name}" in results}
    shares = [
        [100 * found["floor_us"] / us for us in (*DECODE_US[name], found["us"])] for name, found in decodes.items()
    ]
    prefills = {name: results[f"prefill {name}"] for name in PREFILL_TFLOPS if f"prefill {name}" in results}
    rates = [[*PREFILL_TFLOPS[name], found["TFLOP/s"]] for name, found in prefills.items()]
    figure, axes = plt.subplots(1, 2, figsize=(12, 0.75 * max(len(shares), len(rates)) + 1.6))
    panels = (
        (list(decodes), shares, "decode: % of the read bandwidth (4.53 TB/s)", "%.0f %%"),
        (list(prefills), rates, "causal prefill: TFLOP/s", "%.0f"),
    )
    for axis, (names, values, title, form) in zip(axes, panels, strict=True):
        for kind, label in enumerate((*PEERS, "Pagewalk")):
            places = [place + 0.27 * (kind - 1) for place in range(len(names))]
            bars = axis.barh(places, [row[kind] for row in values], 0.25, label=label, color=COLORS[kind])
            axis.bar_label(bars, fmt=form, padding=2, fontsize=8)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.12)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="lower center", ncols=3)
    figure.suptitle("Paged attention kernels on one H200 (longer is better)", fontsize=11)
    save(figure, path, foot=0.05)
