"""The one line that a command prints of a failed call."""

import grpc

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
        " it would take about 1.75 s; try again in 2.5 s [request r]"
    )


def test_what_is_not_known_is_not_said() -> None:
    error = error_of(Failure(code=grpc.StatusCode.UNAVAILABLE, message="gone"))
    assert describe_error(error) == "UNAVAILABLE: gone"
