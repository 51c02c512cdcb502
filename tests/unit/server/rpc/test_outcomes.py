"""The outcome of a cancelled call."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from penstock.server.front.accounts import Outcome, RequestAccount
from penstock.server.front.errors import ErrorReason, Refusal
from penstock.server.front.generation import Generation, TextInput
from penstock.server.front.live_request import LiveRequest
from penstock.server.observe.trace_context import NOT_TRACED
from penstock.server.rpc.handlers import CANCELLED, call_timeout_s, outcome_of, outcome_of_failure


def clock(remaining_s: float | None) -> Any:
    """A context's clock."""
    return SimpleNamespace(time_remaining=lambda: remaining_s)


def account(timeout_s: float = math.inf) -> RequestAccount:
    made = RequestAccount(method="Generate", peer="", arrival_s=0.0, trace=NOT_TRACED)
    made.call_timeout_s = timeout_s
    return made


DEADLINE = Outcome(grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "DEADLINE_EXCEEDED")


@pytest.mark.parametrize(
    ("timeout_s", "remaining_s", "outcome"),
    [
        (math.inf, None, CANCELLED),
        (math.inf, math.inf, CANCELLED),
        (10.0, 5.0, CANCELLED),
        (10.0, 0.0, DEADLINE),
        (10.0, -1.0, DEADLINE),
        # The client's own clock ran out: its timeout came rounded up to us.
        (10.0, 0.09, DEADLINE),
        (10.0, 0.2, CANCELLED),
        (0.1, 0.008, DEADLINE),
    ],
)
def test_a_deadline_or_a_client_that_left(
    timeout_s: float, remaining_s: float | None, outcome: Outcome
) -> None:
    assert outcome_of_failure(account(timeout_s), clock(remaining_s)) == outcome


def test_what_we_had_to_say_counts() -> None:
    told = account()
    told.refusal = Refusal(reason=ErrorReason.QUEUE_FULL)
    assert outcome_of_failure(told, clock(None)) == outcome_of(told.refusal)
    failed = account()
    generation = Generation(prompt=TextInput(text="x"), prompt_path="text_prompt.text")
    failed.live = LiveRequest("r", generation, 0.0)
    failed.live.fail(Refusal(reason=ErrorReason.DRAINING), 1.0)
    expected = Outcome(grpc.StatusCode.UNAVAILABLE.value[0], "DRAINING")
    assert outcome_of_failure(failed, clock(-1.0)) == expected


def test_no_deadline_is_an_endless_one() -> None:
    assert call_timeout_s(clock(None)) == math.inf
    assert call_timeout_s(clock(3.0)) == 3.0
