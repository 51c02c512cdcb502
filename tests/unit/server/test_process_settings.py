"""Settings of processes from flags and environment variables, such as limits, suspected requests
and the gateway.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.server.cli.serve import build_config, merge_settings
from penstock.server.cli.serve_settings import check_gateway
from penstock.server.config import EngineLaunch, ServerConfig, decode_launch, encode_launch
from penstock.server.engine.quarantine import SuspectedRequest
from penstock.server.settings.sources import BadSetting
from support.security_files import SecurityFiles
from support.serve_config import check_launches, serve_config


def config() -> ServerConfig:
    return ServerConfig(
        model="m", model_path=Path("/m"), executor=ExecutorConfig(kind=ExecutorKind.SIMULATED)
    )


def test_limits_come_from_flags_and_variables() -> None:
    arguments = {"executor": "simulated", "engine_hang_s": 120.0}
    merged = merge_settings(arguments, {"PENSTOCK_FRONT_HANG_S": "0"})
    built = build_config(merged)
    assert (built.engine_hang_s, built.front_hang_s) == (120.0, 0.0)
    plain = build_config(merge_settings({"executor": "simulated"}, {}))
    assert (plain.engine_hang_s, plain.front_hang_s) == (30.0, 10.0)


@pytest.mark.parametrize("field", ["engine_hang_s", "front_hang_s"])
@pytest.mark.parametrize("limit_s", [-1.0, 0.5, float("nan"), float("inf")])
def test_limits_that_make_no_sense_are_rejected_by_name(field: str, limit_s: float) -> None:
    values: Any = {field: limit_s}
    with pytest.raises(ValueError, match=field):
        replace(config(), **values)
    with pytest.raises(BadSetting, match=field.replace("_", "-")):
        build_config(merge_settings({"executor": "simulated", field: limit_s}, {}))


def test_an_engine_receives_the_suspected_requests() -> None:
    launch = EngineLaunch(
        server=config(),
        socket_path=Path("/s"),
        listener_fd=5,
        epoch=2,
        board_fd=7,
        suspects=(
            SuspectedRequest(key=1 << 40, num_probation_tokens=16),
            SuspectedRequest(key=3, is_poison=True),
        ),
    )
    assert decode_launch(EngineLaunch, encode_launch(launch)) == launch


def test_the_account_of_many_suspects_fits_into_a_launch() -> None:
    suspects = tuple(
        SuspectedRequest(key=2**62 + number, num_probation_tokens=128) for number in range(5096)
    )
    launch = EngineLaunch(
        server=config(), socket_path=Path("/s"), listener_fd=5, epoch=2, suspects=suspects
    )
    assert len(encode_launch(launch)) < 1 << 20


def test_launch_parameters_that_cannot_be_restored_are_an_error() -> None:
    not_a_path: Any = 1j
    wrong = replace(config(), model_path=not_a_path)
    with pytest.raises(TypeError, match="complex"):
        encode_launch(EngineLaunch(server=wrong, socket_path=Path("/s"), listener_fd=5, epoch=1))


def test_a_suspect_is_checked() -> None:
    with pytest.raises(ValueError, match="key"):
        SuspectedRequest(key=0)
    with pytest.raises(ValueError, match="num_probation_tokens"):
        SuspectedRequest(key=1, num_probation_tokens=0)


def configured(*words: object, **environment: str) -> ServerConfig:
    return serve_config("--executor", "simulated", *words, **environment)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def test_without_a_setting_there_is_no_gateway() -> None:
    assert configured().gateway == "none"


@pytest.mark.usefixtures("installed")
def test_the_gateway_is_set_by_flag_or_variable() -> None:
    for config in (configured("--gateway", "smg"), configured(PENSTOCK_GATEWAY="smg")):
        assert config.gateway == "smg"
        check_launches(config)


def test_an_unknown_gateway_is_rejected_by_name() -> None:
    with pytest.raises(BadSetting, match="PENSTOCK_GATEWAY must be one of none, smg"):
        configured(PENSTOCK_GATEWAY="vllm")


def test_without_its_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    with pytest.raises(BadSetting, match=r"pip install '\.\[gateway\]'"):
        configured("--gateway", "smg")
    configured()  # needs nothing


@pytest.mark.usefixtures("installed")
def test_credentials_that_the_gateway_cannot_send_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    security_files = SecurityFiles(tmp_path)
    files = (
        *(
            "--policy-file",
            security_files.policy_file,
            "--tls-client-ca",
            security_files.clients.ca_file,
        ),
        *("--tls-cert", security_files.cert_file, "--tls-key", security_files.key_file),
    )
    with caplog.at_level(logging.WARNING):
        config = configured("--gateway", "smg", *files)
    assert "the port requires TLS and credentials, and the smg gateway sends none" in caplog.text

    caplog.clear()
    check_gateway(configured("--gateway", "smg", "--fronts", "1"))
    assert caplog.text == ""
    assert config.gateway == "smg"


@pytest.mark.usefixtures("installed")
def test_fronts_that_the_gateway_would_never_reach_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        configured("--fronts", "2")
        assert caplog.text == ""
        configured("--gateway", "smg", "--fronts", "2")

    assert "one of its 2 fronts gets all requests: --fronts 1" in caplog.text
