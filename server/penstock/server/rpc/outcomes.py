"""The outcome of a request: the status of its call, or the one it would have had.

Owns the rules for cancelled calls: by their client, by their deadline, or by us.
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
"""A client's deadline passes before ours: its timeout arrives rounded up by less than a hundredth,
and then it cancels.
"""


class Timed(Protocol):
    """The part of a call's context that is used here."""

    def time_remaining(self) -> float:
        """Seconds to the deadline of the call; None without one, despite the stubs."""
        ...


def outcome_of(refusal: Refusal) -> Outcome:
    """The outcome of a request that was refused or failed with `refusal`."""
    return Outcome(STATUS_RULES[refusal.reason].code.value[0], refusal.reason.value)


def outcome_of_failure(account: RequestAccount, context: Timed) -> Outcome:
    """The outcome of a call that raised.

    Our own failure counts even if the client had disconnected: otherwise impatient clients would
    hide it.
    """
    if account.refusal is not None:
        return outcome_of(account.refusal)
    if account.live is not None and account.live.stream.refusal is not None:
        return outcome_of(account.live.stream.refusal)
    return outcome_of_leaving(context, account.call_timeout_s)


def outcome_of_leaving(context: Timed, timeout_s: float) -> Outcome:
    """The outcome of a call that ended early: its deadline passed, or its client disconnected.

    `timeout_s`: the deadline at the start, infinite without one.
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
