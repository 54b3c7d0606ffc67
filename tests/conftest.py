"""What tests of several packages share: the demo model's folder, and the golden prompts with transformers' answers."""

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
from near_ties import NEAR_TIE

# No test asserts a time: an example that is slow on a busy machine is no failure.
hypothesis.settings.register_profile("pagewalk", deadline=None)
hypothesis.settings.load_profile("pagewalk")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: no process is left alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("browser")}
    items.sort(key=lambda item: item.path not in slow)


@dataclass(frozen=True)
class Golden:
    """One prompt of tests/golden/golden.json."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]

    def check(self, tokens: list[int]) -> None:
        """`tokens` are transformers' greedy tokens; after a near tie that went the other way nothing is compared."""
        assert len(tokens) == len(self.tokens)
        for place, (ours, theirs) in enumerate(zip(tokens, self.tokens, strict=True)):
            if ours != theirs:
                gap = self.gaps[place]
                assert gap < NEAR_TIE, f"token {place} of {len(self.prompt)} + {place}: {ours} != {theirs}, gap {gap}"
                return


@pytest.fixture(scope="session")
def golden() -> list[Golden]:
    content = json.loads((Path(__file__).parent / "golden" / "golden.json").read_text(encoding="utf-8"))
    return [Golden(**entry) for entry in content["entries"]]


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The demo model, from the model cache; the first time it is downloaded (93 MB) and converted (10 s)."""
    from model.source import resolve

    return resolve("smollm2").folder


@pytest.fixture(scope="session")
def native() -> ctypes.CDLL:
    """The CPU kernels, compiled once on this machine. Without a compiler what needs them is skipped."""
    from model.errors import NoNativeKernels
    from model.native_library import compiler, load

    try:
        compiler()
    except NoNativeKernels as error:
        pytest.skip(str(error))
    return load()


@pytest.fixture(params=["native", "torch"])
def cpu_kernels(request: pytest.FixtureRequest) -> ctypes.CDLL | None:
    """Both implementations, as CpuExecutor takes them: the compiled kernels, and None for torch's."""
    return request.getfixturevalue("native") if request.param == "native" else None
