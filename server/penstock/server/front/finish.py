"""The last event of a finished stream: usage and timings. Pure."""

from typing import Protocol

from penstock.scheduler.request import NO_TIME
from penstock.server.front.events import Finished, OutputEnd, Timings, Usage
from penstock.server.front.phases import Phase, PhaseClock


class Ended(Protocol):
    """A request whose outputs have all ended. `first_token_s`: NO_TIME without a token."""

    ends: tuple[OutputEnd, ...]
    phases: PhaseClock
    arrival_s: float
    first_token_s: float
    num_cached_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def num_preemptions(self) -> int:
        """Over all outputs."""
        ...


def finished_event(request: Ended, now_s: float) -> Finished:
    """The event for `request`."""
    ends, phases = request.ends, request.phases
    arrival_s, first_token_s = request.arrival_s, request.first_token_s
    return Finished(
        outputs=ends,
        usage=Usage(
            num_prompt_tokens=request.num_prompt_tokens,
            num_completion_tokens=sum(end.num_completion_tokens for end in ends),
            num_cached_prompt_tokens=request.num_cached_tokens,
        ),
        timings=Timings(
            queue_s=phases.spent_s(Phase.QUEUE),
            prefill_s=phases.spent_s(Phase.PREFILL),
            decode_s=phases.spent_s(Phase.DECODE),
            total_s=max(0.0, now_s - arrival_s),
            ttft_s=None if first_token_s == NO_TIME else max(0.0, first_token_s - arrival_s),
        ),
        num_preemptions=request.num_preemptions,
    )
