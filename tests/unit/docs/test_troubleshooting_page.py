"""docs/troubleshooting.md: the reasons are in the contract, the texts in the code of commands."""

from __future__ import annotations

import re

import grpc
import pytest

from penstock.client.errors import Failure, error_of
from penstock.server.cli.connection import describe_error
from penstock.v1 import ErrorReason
from support.pages import REPOSITORY

PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8").replace("`", "")


def test_every_reason_is_one_of_the_contract() -> None:
    reasons = set(re.findall(r"^\| ([A-Z]+(?:_[A-Z]+)+) \|", PAGE, re.M))

    assert len(reasons) > 8
    assert {f"ERROR_REASON_{reason}" for reason in reasons} <= set(ErrorReason.keys())


@pytest.mark.parametrize(
    "words",
    ["Connection refused", "Failed parsing HTTP/2", "Method not found", "handshake failed"],
)
def test_a_hint_of_a_command_is_on_the_page(words: str) -> None:
    failure = Failure(code=grpc.StatusCode.UNAVAILABLE, message=words)
    hint = describe_error(error_of(failure)).partition(" (")[0].replace("`", "")

    assert re.split("[:?]", hint.replace("the address", "HOST:PORT"))[0] in PAGE
