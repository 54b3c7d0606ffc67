"""Clients that are commands: llm, lm-eval, schemathesis."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compat_server import Served

pytestmark = pytest.mark.compat
BIN = Path(sys.executable).parent
HERE = Path(__file__).parent


def run(*arguments: str, timeout_s: float = 500, **environ: str) -> str:
    """Its output; fails if it does."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | environ
    done = subprocess.run(
        [str(BIN / arguments[0]), *arguments[1:]], capture_output=True, text=True, env=env, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_llm(server: Served, tmp_path: Path) -> None:
    """The command of Simon Willison's llm, with an entry in extra-openai-models.yaml; streamed and not."""
    entry = f"- model_id: ours\n  model_name: served\n  api_base: {server.base_url}\n  api_key_name: ours\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry)
    (tmp_path / "keys.json").write_text(json.dumps({"ours": server.key}))
    asked = ["llm", "-m", "ours", "-o", "temperature", "0", "-o", "max_tokens", "24"]
    for more in ([], ["--no-stream"]):
        assert "Paris" in run(*asked, *more, "Name the capital of France.", LLM_USER_PATH=str(tmp_path))


def lm_eval(server: Served, folder: Path, kind: str, path: str, task: str, *arguments: str) -> dict[str, float]:
    """The results of a task of this repository."""
    options = f"base_url={server.base_url}/{path},model=served,num_concurrent=4,max_retries=1"
    extra = f",tokenizer_backend=remote,auth_token={server.key}" if kind == "local-completions" else ""
    run(
        "lm-eval", "run", "--model", kind, "--model_args", options + extra, "--tasks", task,
        "--include_path", str(HERE / "tasks"), "--output_path", str(folder), *arguments,
        OPENAI_API_KEY=server.key, HF_DATASETS_OFFLINE="1", HF_HOME=str(folder / "hf"),
    )  # fmt: skip
    (found,) = folder.rglob("results_*.json")
    results: dict[str, float] = json.loads(found.read_text())["results"][task]
    return results


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks name their data from here."""
    monkeypatch.chdir(HERE.parents[1])


@pytest.mark.usefixtures("in_root")
def test_lm_eval_log_likelihoods(server: Served, tmp_path: Path) -> None:
    """Multiple choice by the log-likelihood of each continuation: prompts as token ids, echo and logprobs.

    The tokenizer is the server's own, over /tokenizer_info and /tokenize.
    """
    results = lm_eval(server, tmp_path, "local-completions", "completions", "pagewalk_capitals")
    assert results["acc,none"] == 1.0


@pytest.mark.usefixtures("in_root")
def test_lm_eval_chats(server: Served, tmp_path: Path) -> None:
    results = lm_eval(
        server, tmp_path, "local-chat-completions", "chat/completions", "pagewalk_questions", "--apply_chat_template"
    )
    assert results["contains_answer,none"] == 1.0


def test_schemathesis(tiny_server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests made from /openapi.json, good and bad: no 5xx, and every answer has a status and a body as described.

    Not asked: positive_data_acceptance, since a schema cannot say that a prompt must fit into the context or that
    stream_options needs stream. tests/service/test_openapi.py holds what it can say.
    """
    monkeypatch.chdir(tmp_path)  # it leaves a folder behind
    run(
        "st", "run", f"{tiny_server.root}/openapi.json", "--header", f"Authorization: Bearer {tiny_server.key}",
        "--max-examples", "25", "--seed", "1", "--request-timeout", "30", "--phases", "examples,coverage,fuzzing",
        "--exclude-checks", "positive_data_acceptance", "--no-color",
    )  # fmt: skip
