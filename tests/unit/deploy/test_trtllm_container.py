"""The container's files say what an operator relies on."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.executor.trtllm.config import WatchSettings
from penstock.server.config import ServerConfig

DEPLOY = Path(__file__).parents[3] / "deploy" / "trtllm"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICE: dict[str, Any] = COMPOSE["services"]["penstock"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
FRONTS_AFTER_GRACE_S = 2.0


def volume(target: str) -> dict[str, Any]:
    return next(item for item in SERVICE["volumes"] if item["target"] == target)


def instruction(name: str) -> str:
    """The last instruction of that name, its continuation lines joined."""
    joined = DOCKERFILE.replace("\\\n", "")
    found: list[str] = re.findall(rf"^{name} +(.*)$", joined, re.M)
    return found[-1]


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)(s|m)", text)
    assert found is not None
    return int(found[1]) * {"s": 1.0, "m": 60.0}[found[2]]


def test_the_gpus_are_reserved() -> None:
    (device,) = SERVICE["deploy"]["resources"]["reservations"]["devices"]

    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]


def test_only_this_host_reaches_the_port() -> None:
    assert SERVICE["ports"] == ["127.0.0.1:50051:50051"]


@pytest.mark.parametrize("target", ["/models", "/etc/penstock/trtllm.toml"])
def test_the_model_and_the_settings_are_mounted_read_only(target: str) -> None:
    assert volume(target)["read_only"] is True


def test_a_missing_model_folder_is_an_error_and_not_an_empty_folder() -> None:
    assert volume("/models")["bind"]["create_host_path"] is False


def test_compiled_kernels_outlive_the_container() -> None:
    cache = volume("/var/cache/penstock")

    assert cache["type"] == "volume"
    assert cache["source"] in COMPOSE["volumes"]


def test_every_cache_is_below_the_folder_that_is_kept() -> None:
    folders = re.findall(r"\b([A-Z_]+(?:CACHE|_DIR|_BASE|_HOME|PATH)[A-Z_]*)=(/\S+)", DOCKERFILE)
    kept = {name: folder for name, folder in folders if name != "PATH"}

    assert len(kept) >= 7
    assert {
        folder for folder in kept.values() if not folder.startswith("/var/cache/penstock")
    } == set()


def test_shared_memory_and_locked_memory_are_as_the_vendor_runs_it() -> None:
    assert SERVICE["ipc"] == "host"
    assert SERVICE["ulimits"] == {"memlock": -1, "stack": 67108864}


def test_stopping_leaves_time_for_the_drain_and_for_the_engines_end() -> None:
    (grace,) = [
        float(argument.partition("=")[2])
        for argument in SERVICE["command"]
        if argument.startswith("--drain-grace-s=")
    ]

    assert grace == ServerConfig.__dataclass_fields__["drain_grace_s"].default
    needed_s = grace + FRONTS_AFTER_GRACE_S + WatchSettings().shutdown_timeout_s
    assert seconds(SERVICE["stop_grace_period"]) >= needed_s


def test_it_comes_back_by_itself_and_leaves_no_children() -> None:
    assert SERVICE["restart"] == "unless-stopped"
    assert SERVICE["init"] is True
    assert SERVICE["security_opt"] == ["no-new-privileges:true"]


def test_image_and_compose_ask_for_health_alike() -> None:
    check = SERVICE["healthcheck"]
    words = instruction("HEALTHCHECK")

    assert check["test"] == ["CMD", "penstock", "health", "--deadline", "4"]
    assert words.endswith('CMD ["penstock", "health", "--deadline", "4"]')
    for flag, key in (
        ("interval", "interval"),
        ("timeout", "timeout"),
        ("start-period", "start_period"),
        ("retries", "retries"),
    ):
        assert f"--{flag}={check[key]} " in words
    assert seconds(check["start_period"]) >= 600
    assert seconds(check["timeout"]) > 4


def test_the_image_runs_as_a_number_that_is_not_root() -> None:
    user = instruction("USER")

    assert user.isdecimal()
    assert int(user) > 0
    assert f"useradd --uid {user} " in DOCKERFILE.replace("\\\n", "")


def test_the_vendors_script_stays_in_front_and_signals_arrive() -> None:
    assert (
        instruction("ENTRYPOINT")
        == '["/opt/nvidia/nvidia_entrypoint.sh", "/opt/penstock/bin/penstock"]'
    )
    assert instruction("CMD").startswith('["serve", "--executor", "trtllm", ')
    assert instruction("STOPSIGNAL") == "SIGTERM"


def test_no_registry_is_named() -> None:
    sources = re.findall(r"^FROM +(\S+)", DOCKERFILE, re.M)

    assert sources == [
        "python:3.12-slim",
        "${REGISTRY}/nvidia/tensorrt-llm/release:${TRTLLM_VERSION}",
    ]
    assert re.search(r"^ARG REGISTRY$", DOCKERFILE, re.M)
    assert SERVICE["build"]["args"]["REGISTRY"].startswith("${REGISTRY:?")


def test_the_install_is_constrained_and_checked() -> None:
    steps = DOCKERFILE.replace("\\\n", "")
    order = [
        "check_pins.py record > pins/before.txt",
        "check_pins.py constraints",
        "--constraint",
        "check_pins.py record > pins/after.txt",
        "check_pins.py compare pins",
    ]

    places = [steps.index(step) for step in order]

    assert places == sorted(places)
    assert "penstock-*.whl[" not in steps
