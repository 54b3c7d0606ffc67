"""What a front end costs: the benchmark itself, with a few streams of a tiny model's tokenizer."""

import argparse
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from bench import front_end


@pytest.mark.parametrize("chat", [False, True])
async def test_every_token_of_every_stream_comes_through(tmp_path: Path, chat: bool) -> None:
    """Paced, each token is an event of its own."""
    model = str(write_tiny_model(tmp_path))
    options = argparse.Namespace(model=model, front_ends=1, streams=3, tokens=4, step_ms=20.0, chat=chat, requests=5)
    (paced, burst), alone_ms = await front_end.measure(options)
    assert (paced["tokens"], burst["tokens"]) == (12, 12)
    assert paced["cpu_us_per_event"] > 0
    assert 0 < alone_ms["p10"] <= alone_ms["p50"] <= alone_ms["p90"]
