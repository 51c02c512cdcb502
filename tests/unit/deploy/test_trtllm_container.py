"""The TensorRT-LLM container's published port, the time that it has to stop, and its user."""

import re
from pathlib import Path
from typing import Any

import yaml

from penstock.executor.trtllm.config import WatchSettings
from penstock.server.config import ServerConfig

DEPLOY = Path(__file__).parents[3] / "deploy" / "trtllm"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICE: dict[str, Any] = COMPOSE["services"]["penstock"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
FRONTS_AFTER_DRAIN_S = 2.0


def instruction(name: str) -> str:
    """Return the arguments of the Dockerfile's last instruction of that name, as one line."""
    joined = DOCKERFILE.replace("\\\n", "")
    found: list[str] = re.findall(rf"^{name} +(.*)$", joined, re.M)
    return found[-1]


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)(s|m)", text)
    assert found is not None
    return int(found[1]) * {"s": 1.0, "m": 60.0}[found[2]]


def test_only_this_host_reaches_the_port() -> None:
    assert SERVICE["ports"] == ["127.0.0.1:50051:50051"]


def test_stopping_leaves_time_for_the_drain_and_for_the_engines_end() -> None:
    (drain_timeout_s,) = [
        float(argument.partition("=")[2])
        for argument in SERVICE["command"]
        if argument.startswith("--drain-timeout-s=")
    ]

    assert drain_timeout_s == ServerConfig.__dataclass_fields__["drain_timeout_s"].default
    needed_s = drain_timeout_s + FRONTS_AFTER_DRAIN_S + WatchSettings().shutdown_timeout_s
    assert seconds(SERVICE["stop_grace_period"]) >= needed_s


def test_the_image_runs_as_a_number_that_is_not_root() -> None:
    user = instruction("USER")

    assert user.isdecimal()
    assert int(user) > 0
    assert f"useradd --uid {user} " in DOCKERFILE.replace("\\\n", "")
