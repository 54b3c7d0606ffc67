"""Servers for other people's clients (make test-compat). Without the clients, nothing is collected."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from compat_server import ROOT, Served, python, serving

if importlib.util.find_spec("langchain_openai") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model, SmolLM2-135M-Instruct."""
    with serving(tmp_path_factory.mktemp("server"), "smollm2", "--max-model-len", "2048") as served:
        yield served


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of random weights."""
    folder = tmp_path_factory.mktemp("tiny_model")
    make = "import sys; from pathlib import Path; from tiny_model import write_tiny_model as w; w(Path(sys.argv[1]))"
    search = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    python("-c", make, str(folder), PYTHONPATH=search)
    return folder


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    """A tiny model and a short context, for what sends a lot."""
    tiny = ["--load-format", "dummy", "--max-model-len", "128", "--kv-cache-memory-bytes", "8MiB"]
    with serving(tmp_path_factory.mktemp("tiny"), str(tiny_model), *tiny) as served:
        yield served


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model's files, for clients that want its tokenizer."""
    return Path(python("-c", "from model.source import resolve; print(resolve('smollm2').folder)").splitlines()[-1])
