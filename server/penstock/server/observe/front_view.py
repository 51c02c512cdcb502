"""One live request as its front sees it, for people who look.

Owns the value. It holds no token and no text. Times are seconds on the machine's monotonic clock.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontView:
    """A request that has not been released.

    `keys`: of its outputs, as the engine knows them; empty while it is prepared. `phase`: the value
    of a `SegmentKind`; `history`: every phase it entered, with the time, oldest first.
    `trace_id`: 32 hexadecimal digits. `num_backlog_tokens`: output its reader has not taken.
    """

    front_id: int
    keys: tuple[int, ...]
    request_id: str
    tenant: str
    priority: int
    trace_id: str
    arrival_s: float
    phase: str
    history: tuple[tuple[str, float], ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_backlog_tokens: int
