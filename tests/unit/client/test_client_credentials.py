"""Which tokens and certificates a client sends, and that it sends no token unencrypted
over a network.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from penstock.client import ChannelConfig, Client, OperationsClient, SyncClient, TlsConfig
from penstock.client.call_settings import CallSettings
from penstock.client.credentials import check_token
from penstock.client.retry import NO_RETRY

KINDS = (Client, SyncClient, OperationsClient)


def test_each_call_asks_for_the_token() -> None:
    numbers = count()
    settings = CallSettings(retry=NO_RETRY, token=lambda: f"t{next(numbers)}")
    assert settings.shared_metadata() == (("authorization", "Bearer t0"),)
    assert settings.call_metadata((("k", "v"),), None) == (
        ("authorization", "Bearer t1"),
        ("k", "v"),
    )
    own = (("authorization", "Bearer own"),)
    assert settings.call_metadata(own, None) == own, "the word of a call goes before the client's"
    assert "t1" not in repr(CallSettings(retry=NO_RETRY, token="t1"))


@pytest.mark.parametrize("token", ["", "a b", "é", "a\n", "a\r\nx: y"])
def test_invalid_tokens_are_not_sent(token: str) -> None:
    with pytest.raises(ValueError, match="token: must be printable") as caught:
        CallSettings(retry=NO_RETRY, token=lambda: token).shared_metadata()
    assert not token or token not in str(caught.value)
    with pytest.raises(ValueError, match="token: must be printable"):
        check_token(token, (), is_encrypted=True)


@pytest.mark.parametrize(
    ("target", "is_fine"),
    [
        ("127.0.0.1:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("unix:/run/p.sock", True),
        ("dns:///localhost:1", True),
        ("ipv4:127.0.0.1:1,127.0.0.2:1", True),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False),
        ("penstock.test:50051", False),
        ("10.0.0.1:50051", False),
        ("dns:///penstock.test:1", False),
        ("localhost.penstock.test:1", False),
        ("xds:///penstock", False),
    ],
)
def test_no_token_crosses_a_network_in_plain_text(target: str, is_fine: bool) -> None:
    check_token("t", (target,), is_encrypted=True)
    if is_fine:
        check_token("t", (target,), is_encrypted=False)
        return
    with pytest.raises(ValueError, match="plain text"):
        check_token("t", ("127.0.0.1:1", target), is_encrypted=False)


def test_clients_reject_a_token_in_plain_text(tmp_path: Path) -> None:
    for kind in KINDS:
        with pytest.raises(ValueError, match="plain text"):
            kind("penstock.test", token="t")
        kind("penstock.test", token="t", tls=True)
        with pytest.raises(OSError, match=r"none\.pem"):
            kind("penstock.test", tls=TlsConfig(ca=tmp_path / "none.pem"))


def test_a_certificate_has_a_key() -> None:
    with pytest.raises(ValueError, match="cert and key"):
        TlsConfig(cert=Path("cert.pem"))


def test_the_expected_server_name_is_given_to_grpc() -> None:
    name = ("grpc.ssl_target_name_override", "penstock.test")
    assert name in ChannelConfig(server_name="penstock.test").options()
    assert "grpc.ssl_target_name_override" not in dict(ChannelConfig().options())
