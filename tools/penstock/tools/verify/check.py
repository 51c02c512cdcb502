"""What a check is: a promise of a service, and how to put it to the test."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.tools.verify.subject import Subject

CHECK_TIMEOUT_S = 60.0
"""How long a check may take unless it says otherwise. First uses compile kernels and grammars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise of a service. `run` returns one line on what was seen, or raises.

    `feature`: the name in ModelFeatures without which it is skipped; None: every model has it.
    """

    name: str
    run: Callable[[Subject], Awaitable[str]]
    feature: str | None = None
    timeout_s: float = CHECK_TIMEOUT_S
    needs_model: bool = True
