"""No service is open to a network by accident, and invalid files are reported at the start."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.server.security.security import is_loopback
from penstock.server.settings.sources import BadSetting
from support.authority import Authority
from support.security_files import SecurityFiles
from support.serve_config import check_launches, serve_config


@pytest.fixture
def security_files(tmp_path: Path) -> SecurityFiles:
    security_files = SecurityFiles(tmp_path)
    security_files.tokens()
    return security_files


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:127.0.0.1", True),
        ("::ffff:0.0.0.0", False),
        ("fe80::1%lo", False),
        ("no-such-host.invalid", False),
    ],
)
def test_loopback_hosts_are_recognised(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


@pytest.mark.parametrize(
    ("arguments", "door"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0 is"),
        (("--host", "::"), "--host :: is"),
        (("--operations-host", "0.0.0.0"), "--operations-host 0.0.0.0 is"),
        (("--operations-host", "0.0.0.0", "--operations-port", "off"), "(the metrics port)"),
        (("--host", "0.0.0.0", "--tenant-metadata-key", "x-tenant"), "(the service)"),
    ],
)
def test_unauthenticated_callers_are_allowed_only_explicitly(
    arguments: tuple[str, ...], door: str
) -> None:
    with pytest.raises(BadSetting) as caught:
        serve_config(*arguments)
    assert door in str(caught.value)
    assert "allow-anonymous-network" in str(caught.value)
    config = serve_config(*arguments, "--allow-anonymous-network", "on")
    assert config.security.allows_anonymous_network
    with pytest.raises(BadSetting):
        serve_config(*arguments, "--allow-anonymous-network", "off")


def test_credentials_open_the_network_and_plain_text_is_warned_of(
    security_files: SecurityFiles, caplog: pytest.LogCaptureFixture
) -> None:
    policy = ("--policy-file", security_files.policy_file)
    serve_config("--host", "0.0.0.0", "--operations-host", "0.0.0.0", *policy)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    caplog.clear()
    tls = ("--tls-cert", security_files.cert_file, "--tls-key", security_files.key_file)
    config = serve_config("--host", "0.0.0.0", *policy, *tls)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    check_launches(config)


def test_client_certificates_secure_only_the_ports_that_require_them(
    security_files: SecurityFiles,
) -> None:
    mutual = (
        *("--tls-cert", security_files.cert_file, "--tls-key", security_files.key_file),
        *("--tls-client-ca", security_files.clients.ca_file),
    )
    serve_config("--host", "0.0.0.0", *mutual)
    with pytest.raises(BadSetting, match="the metrics port"):
        serve_config("--operations-host", "0.0.0.0", *mutual)


def test_invalid_files_are_reported_at_the_start(
    security_files: SecurityFiles, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other").issue("other")
    bad = tmp_path / "bad.toml"
    bad.write_text("version = 1\n[tenants.a]\nspeed = 3\n")
    cert, key = ("--tls-cert", security_files.cert_file), ("--tls-key", security_files.key_file)
    for arguments, wanted in (
        (("--policy-file", tmp_path / "none.toml"), "none.toml"),
        (("--policy-file", bad), "tenants.a.speed is unknown"),
        (cert, "--tls-cert requires --tls-key"),
        (key, "--tls-key requires --tls-cert"),
        (("--tls-client-ca", security_files.clients.ca_file), "tls-client-ca requires"),
        ((*cert, "--tls-key", other.key_file), "key values mismatch"),
        ((*cert, "--tls-key", tmp_path / "none.key"), "none.key"),
        ((*cert, "--tls-key", bad), "tls.pem"),
        ((*cert, *key, "--tls-client-ca", bad), "bad.toml"),
        ((*cert, *key, "--tls-client-ca", security_files.key_file), "tls.key"),
        (
            ("--policy-file", security_files.policy_file, "--tenant-metadata-key", "x-tenant"),
            "exclude each other",
        ),
        (
            ("--policy-file", security_files.policy_file, "--tenant-weights", "a=2"),
            "tenant-weights",
        ),
    ):
        with pytest.raises(BadSetting) as caught:
            serve_config(*arguments)
        assert wanted in str(caught.value), arguments
