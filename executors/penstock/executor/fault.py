"""Descriptions of simulated faults: which fault to inject, when, and how often.

The simulated executor injects them.
"""

import enum
import math
from dataclasses import dataclass


class FaultKind(enum.StrEnum):
    """The kinds of faults. Kinds in REQUEST_FAULTS affect single requests, the others the whole
    executor.
    """

    REQUEST_FAILS = "request_fails"
    """Only the request fails, with `Fault.detail` as its error."""
    NOT_FINITE = "not_finite"
    """The request's logits are not finite: only the request fails, as with a real model."""
    STEP_RAISES = "step_raises"
    """Computing the request raises, in this step and in every repetition. Only the request fails,
    after the search over the step's rows has identified it.
    """
    NO_TOKENS = "no_tokens"
    """The request gets no token in this step (count 0). Pipeline depth 1 only."""
    EXTRA_TOKENS = "extra_tokens"
    """The request gets `Fault.num_extra` additional tokens, as with speculative decoding, limited
    by its blocks. Pipeline depth 1 only.
    """
    EXECUTOR_DIES = "executor_dies"
    """This `collect`, and every later `launch` and `collect`, raise ExecutorDied."""
    PROCESS_EXITS = "process_exits"
    """The process exits at once with `Fault.exit_code`, as on a driver fault."""
    HANG = "hang"
    """`collect` blocks until `close` is called, then raises ExecutorDied."""
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
    """One scripted fault: it fires when all its conditions hold, at most `max_times` times. Raises
    ValueError naming the field.

    At least one condition is required. `at_step` applies to the step, the other conditions to the
    requests that the step samples. A request fault affects the sampled requests that meet the
    conditions, in row order; each one counts towards `max_times`. An executor fault fires at most
    once per step.

    Attributes:
        at_step: The first step in which it may fire; 1 is the executor's first step.
        at_request: Number of the request in order of first admission; 1 is the first request.
        at_prompt_token: A token id that the request's prompt contains (a poisoned prompt; it fires
            again after a restart of the executor).
        at_output: Index of the output token that the request is about to get; 0 is the first.
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
        """True if the fault affects single requests instead of the whole executor."""
        return self.kind in REQUEST_FAULTS

    @property
    def is_conditional_on_request(self) -> bool:
        """True when the fault has a condition on the sampled requests."""
        return any(
            value is not None for value in (self.at_request, self.at_prompt_token, self.at_output)
        )
