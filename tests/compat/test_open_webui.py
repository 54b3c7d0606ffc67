"""Open WebUI, headless: what its page does to talk with a model, through its own API.

It lives in a venv of its own (requirements-webui.txt); OPEN_WEBUI names its command.
"""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compat_server import Served, free_port, is_ready

COMMAND = os.environ.get("OPEN_WEBUI", "")
PATIENCE_S = 250.0  # its first start makes a database
QUESTION = {"role": "user", "content": "Name the capital of France."}

pytestmark = [
    pytest.mark.compat,
    pytest.mark.skipif(not Path(COMMAND).is_file(), reason="not installed: make test-compat LOAD=1"),
]


class WebUi:
    """Its API, as its only user."""

    def __init__(self, port: int) -> None:
        self._root = f"http://127.0.0.1:{port}"
        self._headers = {"Content-Type": "application/json"}
        token = json.loads(self.ask("/api/v1/auths/signin", email="", password=""))["token"]
        self._headers["Authorization"] = f"Bearer {token}"

    def ask(self, path: str, **body: Any) -> bytes:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self._root + path, data, self._headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: bytes = response.read()
            return answer


@pytest.fixture(scope="module")
def web_ui(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebUi]:
    folder, port = tmp_path_factory.mktemp("webui"), free_port()
    env = os.environ | {
        "DATA_DIR": str(folder),
        "WEBUI_SECRET_KEY": "any",
        "WEBUI_AUTH": "False",
        "OPENAI_API_BASE_URL": server.base_url,
        "OPENAI_API_KEY": server.key,
        "ENABLE_OLLAMA_API": "False",
        "RAG_EMBEDDING_ENGINE": "openai",  # else it loads a model from a hub
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
    }
    log = folder / "webui.log"
    with log.open("w") as out:
        command = [COMMAND, "serve", "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=folder)
    try:
        end = time.monotonic() + PATIENCE_S
        while not is_ready(port, "/health"):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)
        yield WebUi(port)
    finally:
        process.terminate()
        process.wait(60)


def test_models(server: Served, web_ui: WebUi) -> None:
    """It takes what the server lists; and the check of its settings page finds the server."""
    assert [model["id"] for model in json.loads(web_ui.ask("/api/models"))["data"]] == [server.model]
    found = json.loads(web_ui.ask("/openai/verify", url=server.base_url, key=server.key))
    assert found["data"][0]["id"] == server.model


def test_chat(server: Served, web_ui: WebUi) -> None:
    answer = web_ui.ask("/api/chat/completions", model=server.model, messages=[QUESTION], temperature=0, max_tokens=24)
    assert "Paris" in json.loads(answer)["choices"][0]["message"]["content"]


def test_chat_streamed_with_the_page_s_controls(server: Served, web_ui: WebUi) -> None:
    """All that its controls send to an OpenAI API."""
    controls = {
        "temperature": 0, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.1, "presence_penalty": 0.1, "seed": 4,
        "stop": ["END"], "max_tokens": 24, "logit_bias": {"12": 1}, "response_format": {"type": "text"},
    }  # fmt: skip
    answer = web_ui.ask(
        "/api/chat/completions", model=server.model, messages=[QUESTION], stream=True, params=controls,
        stream_options={"include_usage": True},
    )  # fmt: skip
    events = [line[6:] for line in answer.decode().split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    deltas = [each["delta"] for event in events[:-1] for each in json.loads(event)["choices"]]
    assert "Paris" in "".join(delta.get("content", "") for delta in deltas)


def test_titles(server: Served, web_ui: WebUi) -> None:
    """What it asks for by itself after an answer."""
    told = {"role": "assistant", "content": "Paris."}
    answer = web_ui.ask("/api/v1/tasks/title/completions", model=server.model, messages=[QUESTION, told], chat_id="c")
    assert json.loads(answer)["choices"][0]["finish_reason"] in ("stop", "length")
