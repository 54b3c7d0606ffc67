"""docs/map.md knows every module, and the README's word about how much there is to read holds."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("mm", "model", "cuda", "service")


def chapters() -> dict[str, str]:
    """By its heading: the text of each chapter."""
    _, *parts = re.split(r"^## ", (ROOT / "docs" / "map.md").read_text(), flags=re.MULTILINE)
    return {part.partition("\n")[0]: part for part in parts}


def named(text: str) -> list[str]:
    return re.findall(r"`(\w+\.py)`", text)


def afternoon() -> list[Path]:
    """The files of the first chapter. A row without a package goes on in that of the row before."""
    files, package = [], ""
    for line in chapters()["An afternoon"].splitlines():
        if line.startswith("| "):
            first, _, last = line.strip("| ").rpartition(" | ")
            package = next((name for name in PACKAGES if first.startswith(f"`{name}/`")), package)
            files += [ROOT / package / name for name in named(last)]
    return files


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_stands_in_the_map_once(package: str) -> None:
    (rest,) = (text for heading, text in chapters().items() if f"`{package}/`" in heading)
    known = [path.name for path in afternoon() if path.parent.name == package] + named(rest)
    there = {path.name for path in (ROOT / package).glob("*.py") if len(path.read_text().splitlines()) > 1}
    assert sorted(known) == sorted(there)


def test_the_afternoon_is_as_long_as_it_says() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in afternoon())
    for page in ("README.md", "docs/map.md"):
        (said,) = re.findall(r"(\d+),000 lines", (ROOT / page).read_text())
        assert round(lines / 1000) == int(said), f"{page}: {lines} lines"
