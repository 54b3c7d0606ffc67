"""What comes after the logits, timed: adjustments, draws, log-probabilities. A part of bench.kernels.

A launch reads logits that no launch before it has left in the L2. "Reads" is its time over that of reading its logits
once at the speed of the card's memory. Three kinds of logits: normal ones of deviation 3, where a draw is among
thousands of tokens; peaked ones, as a network that is sure gives them, where a few hold nearly all of the mass; and
those of Zipf's law, p ~ 1 / rank ** 1.5, a tail as long as an unsure network's.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench.graph_timing import graph_us
from cuda.adjust import Adjust
from cuda.launch import DeviceLoader
from cuda.sample import Sample, StepResults, want_all_logits
from cuda.scatter import SETTING_WORDS, DeviceState
from model.cuda_rows import CudaRows
from model.step_plan import RowSettings, SamplingParameters

STREAM_BYTES_PER_S = 4.53e12  # read-only, measured on an H200
L2_BYTES = 60e6
HISTORY = 512

WAYS: dict[str, SamplingParameters] = {
    "greedy": SamplingParameters(temperature=0.0),
    "T": SamplingParameters(temperature=0.8),
    "T, k 50, p 0.95": SamplingParameters(temperature=0.8, top_k=50, top_p=0.95),
    "T, k 50, p 0.95, min-p, typical": SamplingParameters(
        temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, typical_p=0.95
    ),
    "T, k 1000": SamplingParameters(temperature=0.8, top_k=1000),
    "T, p 0.95": SamplingParameters(temperature=0.8, top_p=0.95),
    "T, min-p 0.05": SamplingParameters(temperature=0.8, min_p=0.05),
    "T, typical 0.9": SamplingParameters(temperature=0.8, typical_p=0.9),
    "greedy, penalties": SamplingParameters(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1),
    "T, k 50, p 0.95, penalties": SamplingParameters(temperature=0.8, top_k=50, top_p=0.95, frequency_penalty=0.1),
    "greedy, logprobs 5": SamplingParameters(temperature=0.0, logprobs=5),
    "T, k 50, p 0.95, logprobs 5": SamplingParameters(temperature=0.8, top_k=50, top_p=0.95, logprobs=5),
    "greedy, 1,000 allowed": SamplingParameters(temperature=0.0, allowed_token_ids=list(range(0, 49_000, 49))),
}
UNLIKE_NORMAL = ("T", "T, k 50, p 0.95", "T, p 0.95", "T, typical 0.9")
"""What is measured for the other kinds of logits."""


def logits_of(rows: int, vocabulary: int, kind: str) -> torch.Tensor:
    """(rows, vocabulary) float32 on the device. kind: normal, peaked or zipf."""
    if kind == "zipf":
        ranks = torch.rand(rows, vocabulary, device="cuda").argsort(-1)
        return (1.0 + ranks).log_().mul_(-1.5)
    logits = torch.randn(rows, vocabulary, device="cuda") * (2.0 if kind == "peaked" else 3.0)
    if kind == "peaked":
        logits[:, :: vocabulary // 40] += 12.0
    return logits


def launch_of(
    loader: DeviceLoader, logits: torch.Tensor, batch: int, parameters: SamplingParameters
) -> Callable[[int, int], None]:
    """A step's adjust and sample of `batch` rows; launch i takes the next ones."""
    rows, vocabulary = logits.shape
    state = DeviceState("cuda", max_rows=batch, max_pages=1, max_sequences=batch, max_tokens=batch, upload_words=1024)
    table = CudaRows(batch, vocabulary, "cuda", page_locked=True)
    generator = np.random.default_rng(1)
    if parameters.needs_history or parameters.allowed_token_ids:
        logits = logits.clone()  # adjusted in place; what follows wants them as they were
    needed = HISTORY if parameters.needs_history else 0
    histories = [generator.integers(0, vocabulary, needed).astype(np.int32) for _ in range(batch)]
    given = RowSettings(
        np.arange(batch, dtype=np.int32), [parameters] * batch, np.full(batch, HISTORY // 2, np.int32), histories
    )
    settings = table.store(given).settings
    weighs = bool(want_all_logits(settings, vocabulary).any())
    state.settings.copy_(torch.from_numpy(settings.view(np.int32).reshape(-1, SETTING_WORDS)))
    state.rows.copy_(torch.arange(batch))
    state.samples.fill_(1)
    state.lengths.fill_(HISTORY - 1)
    state.upload[7] = max(parameters.logprobs, 0)
    adjust = Adjust(loader, state, vocabulary)
    sample = Sample(loader, state, StepResults(1, batch, page_locked=True), vocabulary)
    parts = logits[: rows // batch * batch].view(-1, batch, vocabulary)

    def launch(stream: int, i: int) -> None:
        part = parts[i % len(parts)]
        adjust(stream, part, batch)
        sample(stream, part, adjust.masked, batch, weighs=weighs)
        assert table is not None  # its memory is read

    return launch


def measure_sampling(loader: DeviceLoader, *, all_sizes: bool) -> Iterator[tuple[str, float, float]]:
    """(name, microseconds, reads) of a step's sampling. all_sizes: more vocabularies and batches."""
    for vocabulary in (151_936, 128_256, 49_152) if all_sizes else (151_936, 49_152):
        for kind in ("normal", "peaked", "zipf"):
            logits = logits_of(1024, vocabulary, kind)
            for batch in (1, 64, 256, 1024) if all_sizes and kind == "normal" else (1, 256):
                size = batch * vocabulary * 4
                launches = min(64, max(4, int(4 * L2_BYTES / size)))
                for name, parameters in WAYS.items():
                    if kind != "normal" and name not in UNLIKE_NORMAL:
                        continue
                    us = graph_us(launch_of(loader, logits, batch, parameters), launches)
                    suffix = "" if kind == "normal" else f", {kind}"
                    yield f"{batch:5,} x {vocabulary:,} {name}{suffix}", us, us / (size / STREAM_BYTES_PER_S * 1e6)
            del logits
