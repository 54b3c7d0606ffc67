"""Dockerfile and compose.yaml: what linters cannot know."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.settings import FIELDS, PREFIX, load_settings

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = pytest.mark.parametrize("name", ["gpu", "cpu"])


def test_the_image_has_both_targets_and_runs_as_nobody_special() -> None:
    assert {"cpu", "gpu"} <= set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE):
        if users := re.findall(r"^USER (\S+)$", stage, re.MULTILINE):
            assert users[-1] == "10001"
    assert re.search(r" AS run\n(?:(?!FROM )[\s\S])*^USER 10001$", DOCKERFILE, re.MULTILINE)


def test_the_image_asks_live() -> None:
    """/health and /ready are 503 while a large model loads: an orchestrator would kill the container."""
    check = re.search(r"HEALTHCHECK.*?CMD (\[.*?\])$", DOCKERFILE, re.DOTALL | re.MULTILINE)
    assert check is not None
    assert "/live" in check[1]
    assert "curl" not in check[1], "the slim image has none"


def test_variables_in_the_image_are_settings() -> None:
    names = re.findall(rf"\b({PREFIX}[A-Z_]+)=", DOCKERFILE)
    values = dict(re.findall(rf"\b({PREFIX}[A-Z_]+)=(\S+)", DOCKERFILE))
    assert set(names) <= {PREFIX + name.upper() for name in FIELDS}
    settings, _ = load_settings({}, values)
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)


@SERVICES
def test_variables_of_a_service_are_settings(name: str) -> None:
    environment = COMPOSE["services"][name]["environment"]
    values = {key: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for key, value in environment.items()}
    load_settings({}, {key: value for key, value in values.items() if key.startswith(PREFIX)})


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
    assert COMPOSE["services"]["cpu"]["profiles"] == ["cpu"]
