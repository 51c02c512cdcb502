"""Definition of a check: a promise of a service, and a function that tests it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.tools.verify.subject import Subject

CHECK_TIMEOUT_S = 60.0
"""Default time limit of a check. First uses compile kernels and grammars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One property of a service. `run` returns one line on what was observed, or raises.

    `feature`: the field of ModelFeatures without which it is skipped; None: every model has it.
    """

    name: str
    run: Callable[[Subject], Awaitable[str]]
    feature: str | None = None
    timeout_s: float = CHECK_TIMEOUT_S
    needs_model: bool = True
