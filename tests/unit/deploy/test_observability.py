"""The files of the observability stack agree with each other and with the service."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.dashboards import DEPLOY, RULES

FOLDER = DEPLOY / "observability"
FRONTS_AFTER_DRAIN_S = 2.0
OBSERVER_AFTER_DRAIN_S = 3.7


def loaded(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return document


COMPOSE = loaded("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
COLLECTOR = loaded("collector.yaml")


def mounts(name: str) -> dict[str, str]:
    """Return a service's mounts as a dict of paths in the container to paths on the host."""
    return {
        target: source
        for source, target in (
            volume.split(":")[:2] for volume in SERVICES[name].get("volumes", ())
        )
    }


def listens(service: str, port: int) -> bool:
    """Return whether the files configure a service to listen on this port of its container."""
    published = [mapping.rpartition(":")[2] for mapping in SERVICES[service]["ports"]]
    return str(port) in published or (service, port) in {
        ("collector", COLLECTOR["service"]["telemetry"]["metrics"]["readers"][0]["pull"]
         ["exporter"]["prometheus"]["port"]),
        ("tempo", port_of(receivers(loaded("tempo.yaml")["distributor"])["grpc"]["endpoint"])),
    }  # fmt: skip


def receivers(owner: dict[str, Any]) -> dict[str, Any]:
    protocols: dict[str, Any] = owner["receivers"]["otlp"]["protocols"]
    return protocols


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_only_this_host_reaches_the_ports_and_none_is_taken_twice() -> None:
    published = [mapping for service in SERVICES.values() for mapping in service["ports"]]
    taken: list[str] = []
    for mapping in published:
        found = re.fullmatch(r"127\.0\.0\.1:(\d+):(\d+)", mapping)
        assert found, mapping
        taken.append(found[1])
    assert len(set(taken)) == len(taken)


def test_mounted_files_exist() -> None:
    for name in SERVICES:
        for target, source in mounts(name).items():
            assert target.startswith("/")
            if source.startswith("."):
                assert (FOLDER / source).exists(), source
            else:
                assert source in COMPOSE["volumes"], source
    used = {source for name in SERVICES for source in mounts(name).values()}
    assert set(COMPOSE["volumes"]) <= used
    configs = {path for path in FOLDER.rglob("*.yaml") if path.name != "compose.yaml"}
    assert configs == {(FOLDER / source).resolve() for source in used if source.startswith("./")}, (
        "a file that nothing mounts"
    )


def test_stopping_leaves_time_for_the_drain() -> None:
    service = SERVICES["penstock"]
    (drain_timeout_s,) = [
        float(part.partition("=")[2])
        for part in service["command"]
        if part.startswith("--drain-timeout-s=")
    ]
    stop_s = float(service["stop_grace_period"].removesuffix("s"))
    assert stop_s >= drain_timeout_s + FRONTS_AFTER_DRAIN_S + OBSERVER_AFTER_DRAIN_S


def test_prometheus_scrapes_what_is_started(tmp_path: Path) -> None:
    config = loaded("prometheus.yaml")
    for job in config["scrape_configs"]:
        for static in job["static_configs"]:
            for target in static["targets"]:
                host, _, port = target.partition(":")
                assert listens("prometheus" if host == "127.0.0.1" else host, int(port)), target
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert "penstock" in jobs, "the name that the alert rules ask for"
    inside = {Path(target).name: source for target, source in mounts("prometheus").items()}
    assert (FOLDER / inside[config["rule_files"][0]]).resolve() == RULES

    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed")
    for path in (FOLDER / "prometheus.yaml", RULES):
        shutil.copy(path, tmp_path)
    checked = subprocess.run(
        [found, "check", "config", str(tmp_path / "prometheus.yaml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_password_is_in_the_files() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    assert not [name for name in environment if "ANONYMOUS" in name]
