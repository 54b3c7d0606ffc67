"""Everything at once over HTTP, in memory that is far too small, while operators act, front ends are killed, copies
fail and memory for steps runs out: every answer is what its request gets alone, no answer is a 5xx, and the books
balance whenever they are looked at.

    make soak-mix MINUTES=60 SEED=7 RECORD=soak.json
"""

import os
import random
from pathlib import Path

import pytest
from faulty_server import Faults
from said import Differs
from soak_mix import LIVES, Ran
from soak_record import MOST_GROWTH
from soak_server import Life
from tiny_model import write_tiny_model

MINUTES = float(os.environ.get("MINUTES") or 1.5)
WANTED = (
    "answers", "audits", "left", "aborted", "timed out", "forks", "restore", "read_slowly", "front ends killed",
    "checkpoint 200", "pause 200", "resume 200", "swap_out 200", "page_cache/pin 200", "page_cache/drop 200",
    "resize 200", "server's preempt_swap", "server's preempt_recompute", "server's swap_in", "server's swap_failed",
    "server's evict", "server's cow_fault",
)  # fmt: skip
"""What must happen in any run."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"), layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, "wrong_page", "lost_page"])
async def test_a_round_of_everything_finds_a_wrong_page_and_nothing_else(
    model: Path, tmp_path: Path, fault: str | None
) -> None:
    """The same requests each time. What may differ by rounding is not asked, so nothing can be excused by it."""
    faults = Faults(no_memory=0.1) if fault is None else Faults(**{fault: 0.2})
    ran = Ran([Life("round", front_ends=0, faults=faults)])
    if fault is None:
        await ran.run(5, 24, 0, model, tmp_path)
        assert ran.happened["answers"] > 0
    else:
        with pytest.raises(ExceptionGroup) as caught:
            await ran.run(5, 24, 60, model, tmp_path)
        assert caught.group_contains(Differs)


@pytest.mark.soak
@pytest.mark.timeout(MINUTES * 60 + 600)
async def test_minutes_of_everything(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the seed; it is printed, with what happened."""
    seed = int(os.environ.get("SEED") or random.randrange(1 << 32))

    def tell(what: object) -> None:
        with capsys.disabled():
            print(what)  # noqa: T201

    tell(f"\nSEED={seed} MINUTES={MINUTES}")
    ran = Ran(LIVES, WANTED)
    try:
        await ran.run(seed, 40, MINUTES * 60, model, tmp_path)
    finally:
        growths = {life.name: ran.record.growth(life.name) for life in LIVES}
        if path := os.environ.get("RECORD"):
            command = f"make soak-mix MINUTES={MINUTES:g} SEED={seed} RECORD={Path(path).name}"
            ran.write(
                Path(path), command=command, growth_mib_a_minute={name: slope for name, (slope, _) in growths.items()}
            )
        tell(dict(sorted(ran.happened.items())))
        tell(f"log-probabilities at most {ran.apart} apart")
        for name, (slope, _) in growths.items():
            tell(f"{name}: the engine's memory grows by {slope:.3f} MiB a minute")
    assert max(growth for _, growth in growths.values()) < MOST_GROWTH
