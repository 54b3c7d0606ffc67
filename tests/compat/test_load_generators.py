"""guidellm, aiperf and `vllm bench serve` against the demo model: every request of a short run succeeds.

Speed is not looked at.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compat_server import Served

BIN = Path(sys.executable).parent
pytestmark = [
    pytest.mark.compat,
    pytest.mark.skipif(not (BIN / "guidellm").exists(), reason="not installed: make test-compat LOAD=1"),
]


def run(folder: Path, *arguments: str, **environ: str) -> None:
    env = os.environ | {"HF_HUB_OFFLINE": "1"} | environ
    command = [str(BIN / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280, cwd=folder)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_guidellm(server: Served, demo_folder: Path, tmp_path: Path) -> None:
    run(
        tmp_path, "guidellm", "run",
        "--backend", f"kind=openai_http,target={server.root},model={server.model},api_key={server.key}",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4",
        "--tokenizer", f"kind=huggingface_auto,model={demo_folder}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--output", f"kind=json,path={tmp_path / 'out.json'}", "--disable-progress",
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0)


def test_aiperf(server: Served, demo_folder: Path, tmp_path: Path) -> None:
    """Chats, streamed, with the server's token counts. It takes tokenizers from a Hugging Face cache: here is one."""
    cached, commit = tmp_path / "hf" / "hub" / "models--local--demo", "0" * 39 + "1"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots" / commit).mkdir(parents=True)
    for file in demo_folder.glob("*.json"):
        shutil.copy(file, cached / "snapshots" / commit)
    run(
        tmp_path, "aiperf", "profile", "-m", server.model, "--endpoint-type", "chat", "--url", server.root,
        "--api-key", server.key, "--streaming", "--request-count", "6", "--concurrency", "2",
        "--tokenizer", "local/demo", "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16",
        "--use-server-token-count", "--ui", "none", "--artifact-dir", str(tmp_path / "out"),
        HF_HOME=str(tmp_path / "hf"),
    )  # fmt: skip
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 6
    assert "error_request_count" not in found or found["error_request_count"]["avg"] == 0


BENCH_SERVE = "import argparse; from vllm.benchmarks.serve import add_cli_args as add, main; " \
    "parser = argparse.ArgumentParser(); add(parser); main(parser.parse_args())"  # fmt: skip
"""`vllm bench serve`, without the rest of that command line, which imports the engine."""


@pytest.mark.parametrize(
    ("backend", "path"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions"), ("vllm", "/v1/completions")],
)
def test_vllm_bench_serve(server: Served, demo_folder: Path, tmp_path: Path, backend: str, path: str) -> None:
    run(
        tmp_path, "python", "-c", BENCH_SERVE, "--backend", backend, "--base-url", server.root, "--endpoint", path,
        "--model", server.model, "--tokenizer", str(demo_folder), "--ready-check-timeout-sec", "60",
        "--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16", "--num-prompts", "6",
        "--max-concurrency", "2", "--ignore-eos", "--save-result", "--save-detailed", "--result-filename", "out.json",
        OPENAI_API_KEY=server.key,
    )  # fmt: skip
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 6 * 16), found["errors"]
    events = 16 + (backend == "openai-chat")  # one a token; before those of a chat the role, which it counts as well
    assert [len(gaps) for gaps in found["itls"]] == [events - 1] * 6
