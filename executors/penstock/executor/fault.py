"""The script language of simulated faults: which fault, when, and how often.

Owns the description of one fault. The executor injects it.
"""

import enum
import math
from dataclasses import dataclass


class FaultKind(enum.StrEnum):
    """The kinds of faults. Those of REQUEST_FAULTS hit single requests, the others the executor."""

    REQUEST_FAILS = "request_fails"
    """The request fails alone, with `Fault.detail`."""
    NOT_FINITE = "not_finite"
    """The request's logits are not finite: it fails alone, as a real model reports it."""
    STEP_RAISES = "step_raises"
    """Computing the request raises, in this step and whenever it is repeated: it fails alone, once
    it is identified among the rows of its step.
    """
    NO_TOKENS = "no_tokens"
    """The request gets no token in this step (a count of 0). Pipeline depth 1 only."""
    EXTRA_TOKENS = "extra_tokens"
    """The request gets `Fault.num_extra` tokens more than one, as with speculation, as far as its
    blocks reach. Pipeline depth 1 only.
    """
    EXECUTOR_DIES = "executor_dies"
    """`collect` raises ExecutorDied, and so does everything after it."""
    PROCESS_EXITS = "process_exits"
    """The process ends at once with `Fault.exit_code`, as on a driver fault."""
    HANG = "hang"
    """`collect` does not return until `close`."""
    SLOW_STEP = "slow_step"
    """The step takes `Fault.seconds` longer."""


REQUEST_FAULTS = frozenset(
    {
        FaultKind.REQUEST_FAILS,
        FaultKind.NOT_FINITE,
        FaultKind.STEP_RAISES,
        FaultKind.NO_TOKENS,
        FaultKind.EXTRA_TOKENS,
    }
)


COUNT_FAULTS = frozenset({FaultKind.NO_TOKENS, FaultKind.EXTRA_TOKENS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One scripted fault: it fires when all given conditions hold, `max_times` times.

    Conditions, of which at least one is given. `at_step`: not before the launched step of this
    ordinal, 1 the executor's first. The others apply to the requests that a step samples:
    `at_request`, the ordinal of the request's first admission, 1 the first; `at_prompt_token`, a
    token id in its prompt (a poisoned prompt: also after a restart of the executor); `at_output`,
    the index of the output token it is about to get, 0 the first. A fault of requests hits the
    sampled requests that meet the conditions in row order, each counting towards `max_times`; one
    of the executor fires once in a step.
    """

    kind: FaultKind
    at_step: int | None = None
    at_request: int | None = None
    at_prompt_token: int | None = None
    at_output: int | None = None
    max_times: int = 1
    detail: str = "scripted fault"
    seconds: float = 1.0
    num_extra: int = 1
    exit_code: int = 9

    def __post_init__(self) -> None:
        lowest = {"at_step": 1, "at_request": 1, "at_prompt_token": 0, "at_output": 0}
        given = {name: getattr(self, name) for name in lowest}
        if all(value is None for value in given.values()):
            raise ValueError("at_step, at_request, at_prompt_token or at_output must be given")
        for name, value in given.items():
            if value is not None and value < lowest[name]:
                raise ValueError(f"{name} must be at least {lowest[name]}, not {value}")
        if self.max_times < 1:
            raise ValueError(f"max_times must be at least 1, not {self.max_times}")
        if not (math.isfinite(self.seconds) and self.seconds >= 0.0):
            raise ValueError(f"seconds must be finite and not negative, not {self.seconds}")
        if self.num_extra < 1:
            raise ValueError(f"num_extra must be at least 1, not {self.num_extra}")
        if not 0 <= self.exit_code <= 255:
            raise ValueError(f"exit_code must be in [0, 255], not {self.exit_code}")

    @property
    def is_for_request(self) -> bool:
        """True when it hits single requests rather than the whole executor."""
        return self.kind in REQUEST_FAULTS

    @property
    def is_conditional_on_request(self) -> bool:
        """True when it waits for a certain request to be sampled."""
        return any(
            value is not None for value in (self.at_request, self.at_prompt_token, self.at_output)
        )
