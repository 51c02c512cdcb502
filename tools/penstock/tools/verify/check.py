"""Definition of a check: a property of a service, and a function that tests it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.tools.verify.subject import Subject

CHECK_TIMEOUT_S = 60.0
"""Default time limit of a check. The first use of a kernel or a grammar compiles it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One property of a service. `run` returns one line on what was observed, or raises.

    `feature`: the field of ModelFeatures that the check requires; it is skipped without. None:
    every model has it.
    """

    name: str
    run: Callable[[Subject], Awaitable[str]]
    feature: str | None = None
    timeout_s: float = CHECK_TIMEOUT_S
    needs_model: bool = True
