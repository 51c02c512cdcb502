"""The last event of a stream that ended well.

Owns its accounts: usage and timings. Pure.
"""

from penstock.scheduler.request import NO_TIME
from penstock.server.front.events import Finished, OutputEnd, Timings, Usage
from penstock.server.front.phases import Phase, PhaseClock


def finished_event(
    ends: tuple[OutputEnd, ...],
    *,
    phases: PhaseClock,
    arrival_s: float,
    first_token_s: float,
    now_s: float,
    num_prompt_tokens: int,
    num_cached_tokens: int,
    num_preemptions: int,
) -> Finished:
    """All outputs ended as `ends` say; `first_token_s` is NO_TIME where there was no token."""
    return Finished(
        outputs=ends,
        usage=Usage(
            num_prompt_tokens=num_prompt_tokens,
            num_completion_tokens=sum(end.num_completion_tokens for end in ends),
            num_cached_prompt_tokens=num_cached_tokens,
        ),
        timings=Timings(
            queue_s=phases.spent_s(Phase.QUEUE),
            prefill_s=phases.spent_s(Phase.PREFILL),
            decode_s=phases.spent_s(Phase.DECODE),
            total_s=max(0.0, now_s - arrival_s),
            ttft_s=None if first_token_s == NO_TIME else max(0.0, first_token_s - arrival_s),
        ),
        num_preemptions=num_preemptions,
    )
