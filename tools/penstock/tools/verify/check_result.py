"""Defines the result of a check, and the exceptions with which a check fails or is skipped."""

import enum
from dataclasses import dataclass


class CheckOutcome(enum.Enum):
    """The outcome of a check: PASS, FAIL or SKIP."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


class CheckFailed(Exception):
    """The service lacks the property that is checked; the message contains what was observed."""


class CheckSkipped(Exception):
    """The check does not apply to this service, or its precondition could not be created; the
    message gives the reason.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Outcome of one check, the reason as one line, and the duration."""

    name: str
    outcome: CheckOutcome
    reason: str
    duration_s: float


def require(condition: bool, message: str) -> None:
    """Raise CheckFailed with `message` unless the condition holds."""
    if not condition:
        raise CheckFailed(message)
