"""Outcomes of a check.

Owns the three outcomes. Independent of the checks and of the output format.
"""

import enum
from dataclasses import dataclass


class Outcome(enum.Enum):
    """Outcome of a check."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


class CheckFailed(Exception):
    """The service violates the property; the message has the observation."""


class CheckSkipped(Exception):
    """There is nothing to check, or the condition could not be produced; see the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Outcome of one check, the reason as one line, and the duration."""

    name: str
    outcome: Outcome
    reason: str
    duration_s: float


def require(condition: bool, complaint: str) -> None:
    """Raise CheckFailed with the complaint unless the condition holds."""
    if not condition:
        raise CheckFailed(complaint)
