"""Every command of the documentation is run, or as much of it as can be run without a GPU, a network and Docker."""

import contextlib
import functools
import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from server_process import Process, free_port
from tiny_model import write_tiny_model

from service.__main__ import parser, run
from service.operator_commands import COMMANDS as OPERATOR_COMMANDS
from service.settings_sources import PREFIX, load_settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HANDLED = ("make", "curl", "pagewalk", "pip", "docker", "openssl")
WORDS = (*HANDLED, "python", "python3", "git", "sh")


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "docs").glob("*/*.md")), ROOT / "CHANGELOG.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    for target in filter(None, (target for pair in targets for target in pair)):
        path, _, anchor = target.partition("#")
        if "://" not in path:
            place = (page.parent / path) if path else page
            assert place.exists(), target
            assert not anchor or anchor in anchors(place), target


def test_flags_and_commands_in_the_text_exist() -> None:
    """In `code` that begins with one; the commands of blocks are run below."""
    makefile = (ROOT / "Makefile").read_text()
    known = {"--max-waiting"}  # the old name of one
    for action in parser()._subparsers._group_actions:  # type: ignore[union-attr]
        verbs = set(action.choices or ())
        for command in dict(action.choices or ()).values():
            known.update(re.findall(r"--[a-z0-9-]+", command.format_help()))
    for module in [*(ROOT / "bench").glob("*.py"), *(ROOT / "service").glob("*.py")]:
        known.update(re.findall(r'"(--[a-z0-9-]+)"', module.read_text()))
    for page in [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*/*.md")]:
        for span in re.findall(r"`((?:--|pagewalk |make )[^`\n]+)`", page.read_text()):
            words = span.split()
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, (page, span)
            if words[0] == "pagewalk":
                assert words[1] in verbs | {"--version"}, (page, span)
            elif words[0] == "make":
                assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), (page, span)


def test_alerts_name_chapters() -> None:
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    named = re.findall(r"docs/operations\.md#(\S+)", alerts)
    assert len(named) == alerts.count("- alert:")
    assert set(named) <= anchors(ROOT / "docs" / "operations.md")


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """(page, text) of the fenced blocks in these languages."""
    for page in PAGES:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            if language in languages:
                yield page.name, block


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) of all blocks of the shell; a command ends where its quotes are closed."""
    for page, block in blocks("", "sh"):
        command = ""
        for line in block.splitlines():
            command += line + "\n"
            try:
                words = [word for word in shlex.split(command, comments=True) if "=" not in word]
            except ValueError:
                continue  # a quote is open
            if words and Path(words[0]).name in WORDS:
                yield page, command.strip()
            command = ""


COMMANDS = sorted(set(commands()))
PROGRAMS = list(blocks("python"))


def of(name: str, *verbs: str) -> pytest.MarkDecorator:
    """The commands of this program, or those of them that begin with one of these words."""
    mine = [each for each in COMMANDS if Path(program(each[1])).name == name]
    mine = [each for each in mine if not verbs or shlex.split(each[1], comments=True)[1] in verbs]
    return pytest.mark.parametrize(("page", "command"), mine, ids=[f"{page}-{command[:60]}" for page, command in mine])


def program(command: str) -> str:
    return next(word for word in shlex.split(command, comments=True) if "=" not in word)


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) > 40
    assert len(PROGRAMS) > 2
    assert {Path(program(command)).name for _, command in COMMANDS} <= {*HANDLED}


def _check_settings(words: list[str]) -> None:
    """As the command does before it loads anything."""
    given = vars(parser().parse_args(words))
    paths = ("tls_cert", "tls_key", "api_key_file", "config")
    load_settings({name: value for name, value in given.items() if name not in paths}, {})


@of("make")
def test_make_knows_the_target(page: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    assert subprocess.run([*words, "-n"], cwd=ROOT, capture_output=True, check=False).returncode == 0
    if "serve" in words:
        arguments = " ".join(word.removeprefix("ARGS=") for word in words if word.startswith("ARGS="))
        _check_settings(["serve", *shlex.split(arguments)])


@of("pagewalk")
def test_pagewalk_takes_the_flags(page: str, command: str) -> None:
    words = [word for word in shlex.split(command, comments=True) if not word.startswith(PREFIX)][1:]
    if words[0] in ("serve", "check", "config"):
        _check_settings(words)
    elif words[0] == "bench":
        _check_help(words[:2], words[2:])
    elif words[0] in OPERATOR_COMMANDS:
        _check_help(words[:1], words[1:])
    else:
        parser().parse_args(words)


def _check_help(command: list[str], words: list[str]) -> None:
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert flags <= _flags_of(*command)


@functools.cache
def _flags_of(*command: str) -> set[str]:
    """What `pagewalk COMMAND --help` names."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run([*command, "--help"]) == 0
    return set(re.findall(r"--[a-z0-9-]+", printed.getvalue()))


@of("docker")
def test_docker_compose_has_the_profile(page: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    profiles = {profile for service in services.values() for profile in service["profiles"]}
    asked = {words[i + 1] for i, word in enumerate(words) if word == "--profile"}
    assert words[-1] == "up"
    assert asked <= profiles
    variables = dict(word.split("=", 1) for word in words if word.startswith(PREFIX))
    load_settings({}, variables)


@of("pip")
def test_pip_is_asked_for_an_extra_that_exists(page: str, command: str) -> None:
    (extra,) = re.findall(r"\[(\w+)\]", command)
    assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


@of("openssl")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_openssl_makes_what_is_said(page: str, command: str, tmp_path: Path) -> None:
    subprocess.run(["sh", "-ec", command], cwd=tmp_path, check=True, timeout=60, capture_output=True)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """A server, and its ports by those that the documentation has."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "model").mkdir()
    model = write_tiny_model(folder / "model")
    admin = free_port()
    named = ["--model", str(model), "--served-model-name", "smollm2", "--load-format", "dummy"]
    (folder / "checkpoints").mkdir()
    options = ["--admin-port", str(admin), "--checkpoint-dir", str(folder / "checkpoints")]
    process = Process(*named, *options, folder=folder)
    try:
        process.until(lambda: process.status("/ready") == 200)
        yield {"8000": process.port, "8001": admin}
    finally:
        process.stop()


@of("pagewalk", "ps", "meminfo", "audit")
def test_commands_that_look_at_a_server_get_an_answer(page: str, command: str, ports: dict[str, int]) -> None:
    words = shlex.split(command, comments=True)[1:]
    url = f"http://127.0.0.1:{ports['8001']}"
    assert run([*words, "--url", url]) == 0


@of("curl")
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl_gets_an_answer(page: str, command: str, ports: dict[str, int]) -> None:
    if "example.org" in command:
        command = command.replace("https://example.org:8000", "http://127.0.0.1:8000").replace("$(cat keys)", "key")
    command = _here(command, ports).replace("curl ", "curl -sS --fail-with-body ", 1)
    _succeeds(["sh", "-ec", command])


@pytest.mark.parametrize(("page", "program"), PROGRAMS, ids=[page for page, _ in PROGRAMS])
def test_a_program_runs_to_its_end(page: str, program: str, ports: dict[str, int]) -> None:
    assert "127.0.0.1:8000" in program, "nothing else is served here"
    _succeeds([sys.executable, "-c", _here(program, ports)])


def _here(text: str, ports: dict[str, int]) -> str:
    """The same for the server of this test."""
    for written, port in ports.items():
        text = text.replace(f"127.0.0.1:{written}", f"127.0.0.1:{port}")
    return text


def _succeeds(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
