"""Defines the faults that the simulated executor can inject: their kinds, the conditions under
which a fault fires, and how often it fires.
"""

import enum
from dataclasses import dataclass

from penstock.scheduler.setting import check, required, setting


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
    by its blocks and by the maximum sequence length. Pipeline depth 1 only.
    """
    EXECUTOR_DIES = "executor_dies"
    """`collect` of this step, and every later `launch` and `collect`, raise ExecutorDied."""
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
    ValueError naming the invalid field.

    At least one condition is required. `at_step` applies to the step, the other conditions to the
    requests that the step samples. A request fault affects the sampled requests that meet the
    conditions, in row order; each one counts towards `max_times`. An executor fault fires at most
    once per step.
    """

    kind: FaultKind = required(
        text="kind of a scripted fault; executors/penstock/executor/fault.py describes each."
        " One of the four conditions must be given"
    )
    at_step: int | None = setting(
        None,
        text="condition: the first step in which the fault may fire; 1 is the executor's first",
        at_least=1,
        shown="any",
    )
    at_request: int | None = setting(
        None,
        text="condition: number of the request in order of first admission; 1 is the first",
        at_least=1,
        shown="any",
    )
    at_prompt_token: int | None = setting(
        None,
        text="condition: a token id that the request's prompt contains (a poisoned prompt; the"
        " fault fires again after a restart of the executor)",
        at_least=0,
        shown="any",
    )
    at_output: int | None = setting(
        None,
        text="condition: index of the output token that the request is about to get; 0 is the"
        " first",
        at_least=0,
        shown="any",
    )
    max_times: int = setting(1, text="how often the fault fires at most", at_least=1)
    detail: str = setting("scripted fault", text="error of request_fails")
    seconds: float = setting(1.0, text="delay of slow_step, seconds", at_least=0)
    num_extra: int = setting(1, text="additional tokens of extra_tokens", at_least=1)
    exit_code: int = setting(9, text="exit code of process_exits", at_least=0, at_most=255)

    def __post_init__(self) -> None:
        conditions = (self.at_step, self.at_request, self.at_prompt_token, self.at_output)
        if all(value is None for value in conditions):
            raise ValueError("at_step, at_request, at_prompt_token or at_output must be given")
        check(self)

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
