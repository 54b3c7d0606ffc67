"""What README and the picture say of the whole engine is what was measured last."""

import re
from pathlib import Path

import pytest

from bench.peers import ROWS, Row, newest

ROOT = Path(__file__).parents[2]
H200 = ROOT / "docs" / "benchmarks" / "h200"
RESULTS = newest([H200 / "peers.json", H200 / "offline.json"])
IN_README = {
    "SmolLM2-135M": "smol chat-1000",
    "Qwen3-0.6B": "qwen06b chat-1000",
    "Llama-3.1-8B": "8b chat-1000",
    "Llama-3.1-8B, temperature 0.8, top-k 50, top-p 0.95": "8b chat-1000, sampled 0.8,50,0.95",
    "Llama-3.1-8B, 512 requests that begin alike": "8b shared-prefix-512",
    "Llama-3.1-8B, 200 prompts with six choices each": "8b parallel-n6-200, sampled 1.0,0,1.0",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_picture_shows_the_newest_results(row: Row) -> None:
    """After a measurement: python -m bench.peers --drawn .../peers.json .../offline.json --plot .../peers.svg"""
    picture = (H200 / "peers.svg").read_text()
    for number in (RESULTS[row.name]["seconds"], row.vllm_s):
        assert f">{number:.2f}</text>" in picture
    assert f">{row.label}</text>" in picture


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_table_of_the_benchmarks_has_the_newest_results(row: Row) -> None:
    page = (H200.parent / "README.md").read_text()
    (cells,) = re.findall(rf"^\| {re.escape(row.label)} \| ([\d.]+) \| ([\d.]+) \| (\w+) \|$", page, re.MULTILINE)
    newest_of_it = RESULTS[row.name]
    assert float(cells[0]) == pytest.approx(newest_of_it["seconds"], abs=0.0051)
    assert float(cells[1]) == row.vllm_s
    assert cells[2] == newest_of_it["commit"]


@pytest.mark.parametrize("network", IN_README)
def test_the_table_of_readme_has_the_newest_results(network: str) -> None:
    (line,) = re.findall(rf"^\| {re.escape(network)} \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    ours, peers = (float(re.findall(r"([\d.]+) s", cell)[0]) for cell in line.split(" | "))
    row = next(row for row in ROWS if row.name == IN_README[network])
    assert ours == pytest.approx(RESULTS[row.name]["seconds"], abs=0.051)
    assert peers == pytest.approx(row.vllm_s, abs=0.051)
