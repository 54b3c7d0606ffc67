"""Dockerfile and compose.yaml: what linters cannot know."""

import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine

from service.metrics import Metrics, ServedFacts
from service.settings import FIELDS
from service.settings_sources import PREFIX, load_settings

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVED = ServedFacts(
    model_name="m",
    dtype="float32",
    kernels="torch",
    page_size=16,
    frames=100,
    gpu_memory_utilization=0.9,
    max_model_len=64,
    tier="gpu",
    prefix_caching=True,
    snapshot=ScriptedEngine(limits=cast(Any, None), script=cast(Any, None)).snapshot,
)
SERVICES = pytest.mark.parametrize("name", ["gpu", "cpu"])


def test_the_image_has_both_targets_and_runs_as_nobody_special() -> None:
    assert {"cpu", "gpu", "router"} <= set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE):
        if users := re.findall(r"^USER (\S+)$", stage, re.MULTILINE):
            assert users[-1] == "10001", stage
    assert re.search(r" AS run\n(?:(?!FROM )[\s\S])*^USER 10001$", DOCKERFILE, re.MULTILINE)


def test_the_image_asks_live() -> None:
    """/health and /ready are 503 while a large model loads: an orchestrator would kill the container."""
    check = re.search(r"HEALTHCHECK.*?CMD (\[.*?\])$", DOCKERFILE, re.DOTALL | re.MULTILINE)
    assert check is not None
    assert check[1] == '["python3", "/usr/local/lib/pagewalk/is_live.py"]', "the slim image has no curl"
    assert "COPY deploy/is_live.py /usr/local/lib/pagewalk/is_live.py" in DOCKERFILE


def test_variables_in_the_image_are_settings() -> None:
    names = re.findall(rf"\b({PREFIX}[A-Z_]+)=", DOCKERFILE)
    values = dict(re.findall(rf"\b({PREFIX}[A-Z_]+)=(\S+)", DOCKERFILE))
    assert set(names) <= {PREFIX + name.upper() for name in FIELDS}
    settings, _ = load_settings({}, values)
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)


ALL_SERVERS = [name for name in COMPOSE["services"] if "env_file" in COMPOSE["services"][name]]


@pytest.mark.parametrize("name", ALL_SERVERS)
def test_variables_of_a_service_are_settings_that_no_file_may_change(name: str) -> None:
    """What has a default here would silently replace a line of pagewalk.env, a key for example."""
    environment = COMPOSE["services"][name]["environment"]
    assert not [value for value in environment.values() if "$" in value]
    load_settings({}, environment)


@pytest.mark.parametrize("name", ALL_SERVERS)
def test_the_shell_wins_over_the_file_of_settings(name: str) -> None:
    """Of two files the later one wins, and a name without a value is the shell's, or nothing."""
    files = COMPOSE["services"][name]["env_file"]
    assert files == [{"path": "pagewalk.env", "required": False}, {"path": "deploy/shell.env"}]
    lines = (ROOT / "deploy" / "shell.env").read_text().splitlines()
    names = {line for line in lines if not line.startswith("#")}
    assert {each for each in names if each.startswith(PREFIX)} <= {PREFIX + field.upper() for field in FIELDS}
    assert names >= {"PAGEWALK_MODEL", "PAGEWALK_API_KEY", "HF_TOKEN"}
    assert not names & set(COMPOSE["services"][name]["environment"]), "those could not be changed"


def test_the_router_lasts_as_long_as_the_servers_behind_it() -> None:
    services = COMPOSE["services"]
    assert services["router"]["stop_grace_period"] == services["replica-gpu-1"]["stop_grace_period"]


@SERVICES
def test_a_service_may_finish_what_runs(name: str) -> None:
    service = COMPOSE["services"][name]
    grace_s = int(service["stop_grace_period"].removesuffix("s"))
    assert grace_s >= int(service["environment"]["PAGEWALK_SHUTDOWN_TIMEOUT"]) + 10


@SERVICES
def test_the_admin_port_is_published_on_loopback_only(name: str) -> None:
    (admin,) = [port for port in COMPOSE["services"][name]["ports"] if port.endswith(":8001")]
    assert admin.startswith("127.0.0.1:")


@SERVICES
def test_a_service_writes_to_its_cache_only(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert [volume.split(":")[1] for volume in service["volumes"]] == ["/cache"]
    assert service["build"]["target"] == name


def test_the_gpu_service_reserves_a_gpu() -> None:
    (device,) = COMPOSE["services"]["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert "gpu" in device["capabilities"]


def test_a_profile_starts_its_server_and_no_other() -> None:
    """`docker compose up` starts the GPU's server; the variable of .env counts only where no --profile is given."""
    assert (ROOT / ".env").read_text().endswith("COMPOSE_PROFILES=gpu\n")
    profiles = {name: tuple(service["profiles"]) for name, service in COMPOSE["services"].items()}
    assert [name for name, active in profiles.items() if "gpu" in active] == ["gpu"]
    assert [name for name, active in profiles.items() if "cpu" in active] == ["cpu"]
    assert [name for name, active in profiles.items() if "scale" in active] == [
        "replica-gpu-1",
        "replica-gpu-2",
        "router",
    ]
    assert [name for name, active in profiles.items() if "scale-cpu" in active] == [
        "replica-cpu-1",
        "replica-cpu-2",
        "router",
    ]


def test_the_router_knows_the_replicas_of_either_kind() -> None:
    services = COMPOSE["services"]
    addresses = [f"http://{name}:8000" for name in ("replica-1", "replica-2")]
    assert services["router"]["command"][:3] == ["--worker-urls", *addresses]
    for kind in ("gpu", "cpu"):
        aliases = [services[f"replica-{kind}-{number}"]["networks"]["default"]["aliases"] for number in (1, 2)]
        assert aliases == [["replica-1"], ["replica-2"]]


def test_only_the_routers_and_servers_ports_can_be_opened_to_the_world() -> None:
    for name, service in COMPOSE["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:") or (
                port.startswith("${PAGEWALK_BIND:-127.0.0.1}:") and name != "grafana"
            )


EXPRESSIONS = [
    target["expr"]
    for panel in json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "pagewalk.json").read_text())["panels"]
    for target in panel.get("targets", [])
] + [
    rule["expr"]
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_what_is_plotted_and_watched_is_measured(expression: str) -> None:
    """Every series of the dashboard and of the alerts is in /metrics, with the labels that are asked for."""
    metrics = Metrics("1.0")
    metrics.serve(SERVED)
    metrics.http.http_ended("/v1/completions", "POST", 200)
    labels: dict[str, dict[str, set[str]]] = {"up": {"job": {"pagewalk"}}}
    for family in text_string_to_metric_families(metrics.render("")[0].decode()):
        for sample in family.samples:
            of_it = labels.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                of_it.setdefault(label, set()).add(value)
    asked = re.findall(r"\b((?:pagewalk_|vllm:)\w+|up)(?:\{([^}]*)\})?", expression)
    assert asked
    for name, matchers in asked:
        assert name in labels, name
        for label, is_pattern, value in re.findall(r"(\w+)=(~?)\"([^\"]*)\"", matchers):
            if label in ("instance", "status"):  # of Prometheus; of answers that have not been given here
                continue
            wanted = value.split("|") if is_pattern else [value]
            for one in wanted:
                assert any(re.fullmatch(one, known) for known in labels[name][label]), f"{name}: {label} {one}"


def locked(name: str) -> dict[str, str]:
    """Package -> version of a lock file."""
    text = (ROOT / "deploy" / "locks" / f"{name}.txt").read_text()
    return {
        canonicalize_name(package): version
        for package, version in re.findall(r"^(\S+?)==(\S+) \\$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("name", ["build", "cpu", "gpu", "router"])
def test_every_locked_package_has_its_hash_and_no_address(name: str) -> None:
    text = (ROOT / "deploy" / "locks" / f"{name}.txt").read_text()
    packages = re.split(r"^(?=\S+==)", text, flags=re.MULTILINE)[1:]
    assert packages
    assert all(re.match(r"\S+==\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+$", package) for package in packages)
    assert "://" not in text


@pytest.mark.parametrize(("name", "extras"), [("cpu", ()), ("gpu", ("cuda",))])
def test_the_locks_hold_what_is_tested(name: str, extras: tuple[str, ...]) -> None:
    """`make locks` was run after dependencies or pins changed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    lock = locked(name)
    for line in asked:
        requirement = Requirement(line)
        assert requirement.specifier.contains(lock[canonicalize_name(requirement.name)].partition("+")[0]), line
    pins = (ROOT / "constraints.txt").read_text()
    pinned = {
        canonicalize_name(package): version for package, version in re.findall(r"^(\S+)==(\S+)$", pins, re.MULTILINE)
    }
    assert {package: version.partition("+")[0] for package, version in lock.items() if package in pinned} == {
        package: version for package, version in pinned.items() if package in lock
    }


def test_an_image_installs_by_hash_alone() -> None:
    installs = re.findall(r"^RUN pip install (.*)$", DOCKERFILE, re.MULTILINE)
    assert len(installs) == 6
    for line in installs:
        assert "--require-hashes" in line or "--no-deps --no-build-isolation ." in line


def certificate_in(folder: Path) -> ssl.SSLContext:
    """A server's, of nobody in particular."""
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    files = [str(folder / "cert.pem"), str(folder / "key.pem")]
    command = [*made, "-subj", "/CN=example.org", "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    return context


@pytest.mark.parametrize(
    "scheme",
    ["http", pytest.param("https", marks=pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl"))],
)
@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_tells_what_live_says(status: int, code: int, scheme: str, tmp_path: Path) -> None:
    class Live(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/live" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    environment = {}
    with HTTPServer(("127.0.0.1", 0), Live) as server:
        if scheme == "https":
            environment["PAGEWALK_TLS_CERT"] = str(tmp_path / "cert.pem")
            server.socket = certificate_in(tmp_path).wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        command = [sys.executable, str(ROOT / "deploy" / "is_live.py")]
        environment["PAGEWALK_PORT"] = str(server.server_port)
        result = subprocess.run(command, env=environment, capture_output=True, check=False)
        thread.join()
    assert result.returncode == code


def test_the_health_check_of_a_server_that_is_gone_fails() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        command = [sys.executable, str(ROOT / "deploy" / "is_live.py")]
        environment = {"PAGEWALK_PORT": str(free.getsockname()[1])}
        assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 1
