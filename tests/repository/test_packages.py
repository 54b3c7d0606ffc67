"""The repository as a whole: how its packages are found, and what its files must not contain."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tracked_files() -> list[Path]:
    """What stands under version control, or would: nothing that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [path for name in names if name and (path := ROOT / name).is_file()]


def test_our_packages_are_found_from_any_folder(tmp_path: Path) -> None:
    """`cuda` is one namespace of two owners: ours, and NVIDIA's packages, which CuPy and torch import."""
    code = (
        "import importlib.util as u, mm, model, service, bench, cuda\n"
        "assert u.find_spec('cuda.compile') and u.find_spec('cuda.kernels')\n"
        "assert cuda.__file__ is None, 'an __init__.py hides the other owner'\n"
        "print(bool(u.find_spec('cuda.pathfinder')))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_namespaces_of_two_owners_import_together(tmp_path: Path) -> None:
    """The same with NVIDIA's part standing in another folder, as site-packages does."""
    (tmp_path / "cuda" / "elsewhere").mkdir(parents=True)
    (tmp_path / "cuda" / "elsewhere" / "__init__.py").write_text("NAME = 'theirs'\n")
    code = "import cuda.elsewhere, cuda.errors; print(cuda.elsewhere.NAME, cuda.errors.__file__)"
    environ = {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert result.stdout.startswith(f"theirs {ROOT / 'cuda'}"), result.stderr


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pinned = _read("constraints.txt") + _read("constraints-cpu.txt")
    pins = {name.lower().replace("_", "-") for name in re.findall(r"^([\w.-]+)==", pinned, re.MULTILINE)}
    names = {re.split(r"[<>=\[ ]", text)[0].lower().replace("_", "-") for text in wanted}
    assert names - pins == set()


def _read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_no_file_knows_an_index_of_packages() -> None:
    """Where packages come from is pip's configuration; PyTorch's public CPU index is the one exception."""
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", "replace")
        found += re.findall(r"https?://[^/\s\"']+/(?:[^\s\"']*/)?simple\b", text)
        found += re.findall(r"--(?:extra-)?index-url[= ]+\"?(https?://(?!download\.pytorch\.org/)\S+)", text)
    assert found == []


def test_no_file_is_large() -> None:
    """Models and other data are fetched, by hash; a clone stays small."""
    assert [str(path) for path in tracked_files() if path.stat().st_size > 2_000_000] == []


def test_a_wheel_carries_every_file_of_the_packages() -> None:
    """Kernels, workloads, pages: what is not Python has to be named. `make release` tries the wheel itself."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages, data = setuptools["packages"], setuptools["package-data"]
    for path in tracked_files():
        name = path.relative_to(ROOT)
        package = ".".join(name.parent.parts)
        if name.parts[0] not in ("service", "model", "cuda", "mm", "bench"):
            continue
        if package in packages and path.suffix == ".py":
            continue
        holders = [each for each in packages if (package + ".").startswith(each + ".")]
        inside = ((each, name.relative_to(Path(*each.split(".")))) for each in holders)
        assert any(rest.match(pattern) for each, rest in inside for pattern in data.get(each, ())), name


def test_the_changelog_begins_with_this_version() -> None:
    version = tomllib.loads(_read("pyproject.toml"))["project"]["version"]
    (newest, *_) = re.findall(r"^## \[([^]]+)\]", _read("CHANGELOG.md"), re.MULTILINE)
    assert newest == version


def test_what_is_not_ours_is_named_with_its_licence() -> None:
    """In NOTICE, which goes with the wheel as every licence does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    licences = {path for pattern in project["license-files"] for path in ROOT.glob(pattern)}
    assert {ROOT / "LICENSE", ROOT / "NOTICE"} <= licences
    vendored = [path for path in tracked_files() if "vendor" in path.parts]
    assert vendored
    for path in vendored:
        assert path.name in _read("NOTICE"), path
        name = path.name.partition(".")[0]
        assert any(licence.name == f"{name}.LICENSE" for licence in licences), path
        version = re.search(rf"^{name} (\S+)", _read("NOTICE"), re.MULTILINE)
        assert version is not None
        assert path.suffix != ".js" or f"v{version[1]}" in path.read_text()[:200]
