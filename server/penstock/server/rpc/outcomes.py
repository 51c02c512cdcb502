"""How a request ended, as the status of its call says it, or would have had anybody listened.

Owns the judgement of calls that were cancelled: by their client, by their deadline, or by us.
"""

import math
from typing import Final, Protocol, cast

import grpc

from penstock.server.front.errors import ErrorReason, Refusal
from penstock.server.front.request_account import Outcome, RequestAccount
from penstock.server.rpc.statuses import STATUS_RULES

OK: Final = Outcome(grpc.StatusCode.OK.value[0])
CANCELLED: Final = Outcome(grpc.StatusCode.CANCELLED.value[0])
_DEADLINE_SLACK_S = 0.01
_DEADLINE_SLACK_SHARE = 0.01
"""A client's time is over before ours: its timeout comes rounded up, by less than a hundredth, and
then it cancels."""


class Timed(Protocol):
    """As much of a call's context as is needed here."""

    def time_remaining(self) -> float:
        """Seconds to the deadline of the call; None without one, whatever the stubs say."""
        ...


def outcome_of(refusal: Refusal) -> Outcome:
    """The outcome of a request that is told `refusal`."""
    return Outcome(STATUS_RULES[refusal.reason].code.value[0], refusal.reason.value)


def outcome_of_failure(account: RequestAccount, context: Timed) -> Outcome:
    """The outcome of a call that raised.

    What we had to say counts, even where nobody was left to hear it: so what fails here does not
    hide behind clients that lose patience.
    """
    if account.refusal is not None:
        return outcome_of(account.refusal)
    if account.live is not None and account.live.stream.refusal is not None:
        return outcome_of(account.live.stream.refusal)
    return outcome_of_leaving(context, account.call_timeout_s)


def outcome_of_leaving(context: Timed, timeout_s: float) -> Outcome:
    """The outcome of a call that ended under way: its deadline passed, or its client left.

    `timeout_s`: what the deadline was at first, infinite without one.
    """
    remaining_s = cast(float | None, context.time_remaining())
    slack_s = _DEADLINE_SLACK_S + _DEADLINE_SLACK_SHARE * timeout_s
    if remaining_s is not None and math.isfinite(remaining_s) and remaining_s <= slack_s:
        return outcome_of(Refusal(reason=ErrorReason.DEADLINE_EXCEEDED))
    return CANCELLED


def call_timeout_s(context: Timed) -> float:
    """The time until a call's deadline, infinite without one."""
    remaining_s = cast(float | None, context.time_remaining())
    return math.inf if remaining_s is None else remaining_s
