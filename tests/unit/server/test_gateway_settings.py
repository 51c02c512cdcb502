"""`--gateway`: valid values, and errors that name missing requirements."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.server.cli.serve import build_config, merge_settings
from penstock.server.cli.serve_settings import check_gateway
from penstock.server.config import FrontLaunch, decode_launch, encode_launch
from penstock.server.settings.sources import BadSetting, Sources
from support.guarded import Premises


def settings(environment: dict[str, str] | None = None, **arguments: Any) -> Sources:
    return merge_settings({"executor": "simulated", **arguments}, environment or {})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def test_by_itself_there_is_none() -> None:
    assert build_config(settings()).gateway == "none"


@pytest.mark.usefixtures("installed")
def test_flag_and_variable() -> None:
    assert build_config(settings(gateway="smg")).gateway == "smg"
    config = build_config(settings({"PENSTOCK_GATEWAY": "smg"}))
    assert config.gateway == "smg"
    launch = FrontLaunch(server=config, socket_path=Path("/tmp/x"), front_id=1, port=1)
    assert decode_launch(FrontLaunch, encode_launch(launch)) == launch


def test_an_unknown_one_is_refused_by_name() -> None:
    with pytest.raises(BadSetting, match="PENSTOCK_GATEWAY must be one of none, smg"):
        build_config(settings({"PENSTOCK_GATEWAY": "vllm"}))
    with pytest.raises(BadSetting, match="--gateway must be one of none, smg"):
        build_config(settings(gateway="vllm"))


def test_without_its_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    with pytest.raises(BadSetting, match=r"install penstock\[gateway\]"):
        build_config(settings(gateway="smg"))
    build_config(settings())  # needs nothing


@pytest.mark.usefixtures("installed")
def test_what_the_gateway_cannot_show_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    premises = Premises(tmp_path)
    files: dict[str, Any] = {
        "policy_file": str(premises.policy_file),
        "tls_cert": str(premises.cert_file),
        "tls_key": str(premises.key_file),
        "tls_client_ca": str(premises.clients.ca_file),
    }
    with caplog.at_level(logging.WARNING):
        config = build_config(settings(gateway="smg", **files))
    assert "the port asks for TLS and credentials and the smg gateway has none" in caplog.text

    caplog.clear()
    check_gateway(build_config(settings(gateway="smg", fronts=1)))
    assert caplog.text == ""
    assert config.gateway == "smg"


@pytest.mark.usefixtures("installed")
def test_fronts_that_the_gateway_would_never_reach_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        build_config(settings(fronts=2))
        assert caplog.text == ""
        build_config(settings(gateway="smg", fronts=2))

    assert "one of its 2 fronts gets all requests: --fronts 1" in caplog.text
