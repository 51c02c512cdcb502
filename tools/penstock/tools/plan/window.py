"""Selects the part of a trace that a plan uses: the busiest window.

Only this window is simulated, because capacity must suffice for the peak, and a plan simulates its
requests many times.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.server.observe.recording.trace import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanWindow:
    """A window of a trace; the arrival times of `requests` are relative to its start.

    `start_s`, `end_s`: the position of the window in the trace. `num_trace_requests`: number of
    requests in the whole trace; `trace_s`: its duration from the first to the last arrival,
    seconds.
    """

    requests: tuple[TraceRequest, ...]
    start_s: float
    end_s: float
    num_trace_requests: int
    trace_s: float

    @property
    def num_left_out(self) -> int:
        """Number of requests outside the window."""
        return self.num_trace_requests - len(self.requests)

    @property
    def requests_per_s(self) -> float:
        """The arrival rate in the window."""
        return len(self.requests) / (self.end_s - self.start_s)


def busiest_window(trace: Sequence[TraceRequest], window_s: float) -> PlanWindow:
    """Return the window of `window_s` seconds, beginning with an arrival, that has the most tokens.

    Prompt and output tokens are counted; among windows with equally many, the first is chosen.
    `trace` must have at least one request and be in order of arrival. A trace shorter than the
    window is returned whole; its `end_s` is then at least one second after its start.
    """
    first_s, last_s = trace[0].arrival_s, trace[-1].arrival_s
    begin, end = 0, len(trace)
    if last_s - first_s >= window_s:
        begin, end = _most_tokens(trace, window_s)
    chosen = trace[begin:end]
    start_s = chosen[0].arrival_s
    is_whole = len(chosen) == len(trace)
    return PlanWindow(
        requests=tuple(msgspec.structs.replace(r, arrival_s=r.arrival_s - start_s) for r in chosen),
        start_s=start_s,
        # Avoids division by zero: a single request counts as one second.
        end_s=max(last_s, start_s + 1.0) if is_whole else start_s + window_s,
        num_trace_requests=len(trace),
        trace_s=last_s - first_s,
    )


def _most_tokens(trace: Sequence[TraceRequest], window_s: float) -> tuple[int, int]:
    best, best_tokens = (0, 1), -1
    end = num_tokens = 0
    for begin, request in enumerate(trace):
        while end < len(trace) and trace[end].arrival_s < request.arrival_s + window_s:
            num_tokens += _tokens(trace[end])
            end += 1
        if num_tokens > best_tokens:
            best, best_tokens = (begin, end), num_tokens
        num_tokens -= _tokens(request)
    return best


def _tokens(request: TraceRequest) -> int:
    return request.num_prompt_tokens + request.num_output_tokens
