"""The line that a command prints for a failed call."""

import grpc
import pytest

from penstock.client.errors import Failure, error_of
from penstock.server.cli.connection import describe_error


def test_a_refused_deadline_says_what_it_takes_and_when_to_come_back() -> None:
    error = error_of(
        Failure(
            code=grpc.StatusCode.DEADLINE_EXCEEDED,
            reason="DEADLINE_UNREACHABLE",
            message="the deadline cannot be met",
            retry_after_s=2.5,
            metadata={"estimate_ms": "1750"},
            request_id="r",
        )
    )
    assert describe_error(error) == (
        "DEADLINE_EXCEEDED (DEADLINE_UNREACHABLE): the deadline cannot be met;"
        " estimated time 1.75 s; retry in 2.5 s [request r]"
    )


def test_what_is_not_known_is_not_said() -> None:
    error = error_of(Failure(code=grpc.StatusCode.UNAVAILABLE, message="gone"))
    assert describe_error(error) == "UNAVAILABLE: gone"


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        (
            "ipv4:127.0.0.1:9: Failed to connect to remote host: Connection refused",
            "no service at 127.0.0.1:9: is `penstock serve` running? (UNAVAILABLE: ",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to"
            " connect to remote host: Connection refused",
            "no service at 127.0.0.1:9: is `penstock serve` running?"
            " (UNAVAILABLE: Connection refused)",
        ),
        (
            "ipv6:%5B::1%5D:9: Failed to connect to remote host: Connection refused",
            "no service at [::1]:9: is ",
        ),
        (
            "unix:/run/p.sock: Failed to connect to remote host: No such file or directory",
            "no service at /run/p.sock: is ",
        ),
        (
            "ipv4:127.0.0.1:9: Failed parsing HTTP/2 (Expected SETTINGS frame)",
            "127.0.0.1:9 is not a gRPC port: ",
        ),
        ("Method not found!", "wrong port: "),
        ("Tls handshake failed (TSI_PROTOCOL_FAILURE)", "only one side uses TLS"),
    ],
)
def test_where_no_service_answers_the_line_says_what_to_look_for(said: str, hint: str) -> None:
    error = error_of(Failure(code=grpc.StatusCode.UNAVAILABLE, message=said))
    assert describe_error(error).startswith(hint)

    of_service = Failure(code=grpc.StatusCode.UNAVAILABLE, reason="ENGINE_DOWN", message=said)
    assert hint not in describe_error(error_of(of_service)).replace(said, "")
