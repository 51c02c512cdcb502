"""Builders of a load generator's plans and of the events that it receives."""

from typing import Any

from penstock.client import Finished, FinishReason, OutputEnd, Timings, Tokens, Usage
from penstock.tools.bench.plan import Arrivals, LoadPlan


def plan(**settings: Any) -> LoadPlan:
    """Return a plan, by default of ten evenly spaced requests per second from 0 s to 10 s, without
    a warm-up.
    """
    chosen: dict[str, Any] = {"vocab_size": 1000, "warm_up_s": 0.0, "duration_s": 10.0, **settings}
    if "arrivals" not in chosen:
        chosen |= {"arrivals": Arrivals.CONSTANT, "rate_per_s": chosen.get("rate_per_s", 10.0)}
    return LoadPlan(**chosen)


def tokens(num_tokens: int = 1) -> Tokens:
    return Tokens(sequence=1, output_index=0, text="x", records=(), num_tokens=num_tokens)


def finished(
    num_tokens: int = 2,
    *,
    reason: FinishReason = FinishReason.LENGTH,
    queue_s: float = 0.25,
) -> Finished:
    return Finished(
        sequence=2,
        outputs=(
            OutputEnd(
                output_index=0,
                finish_reason=reason,
                stop_string=None,
                stop_token_id=None,
                num_completion_tokens=num_tokens,
            ),
        ),
        usage=Usage(
            num_prompt_tokens=8, num_completion_tokens=num_tokens, num_cached_prompt_tokens=4
        ),
        timings=Timings(queue_s=queue_s, prefill_s=0.0, ttft_s=0.5, decode_s=0.5, total_s=1.0),
        num_preemptions=0,
    )
