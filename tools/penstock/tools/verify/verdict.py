"""How a check can end.

Owns the three outcomes. Does not know any check, nor how they are shown.
"""

import enum
from dataclasses import dataclass


class Outcome(enum.Enum):
    """How a check ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


class CheckFailed(Exception):
    """The service does not do what it promises; the message has what was observed."""


class CheckSkipped(Exception):
    """There is nothing to check, or no way to provoke it; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """How one check ended, why in one line, and how long it took."""

    name: str
    outcome: Outcome
    reason: str
    duration_s: float


def require(condition: bool, complaint: str) -> None:
    """Raise CheckFailed with the complaint unless the condition holds."""
    if not condition:
        raise CheckFailed(complaint)
