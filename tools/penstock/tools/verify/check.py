"""Defines a check, which tests one property of a service."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.tools.verify.subject import Subject

CHECK_TIMEOUT_S = 60.0
"""Default time limit of a check, seconds; long, because a kernel or a grammar is compiled at its
first use.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check of one property of a service. `run` returns one line with what it observed, or raises
    CheckFailed, CheckSkipped or the error of a call. The error of a call counts as a failure.

    `feature`: the field of ModelFeatures that the check requires; if the model lacks the feature,
    the check is skipped. None: no feature is required. `needs_model`: the check is skipped if the
    check that calls GetModel has failed.
    """

    name: str
    run: Callable[[Subject], Awaitable[str]]
    feature: str | None = None
    timeout_s: float = CHECK_TIMEOUT_S
    needs_model: bool = True
