"""What a front tells of itself once a second.

Owns the value. Counters only grow while the front lives, so a beat that is lost costs nothing.
"""

import math
from dataclasses import dataclass

import msgspec

from penstock.server.link.wire import TaggedFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeCount:
    """How many requests of one kind have ended in one way. Names as in `RequestRecord`.

    `finish_reason`: of the first output, empty when there is none.
    """

    method: str
    code: int
    reason: str
    finish_reason: str
    num: int


class Beat(TaggedFrame, frozen=True, kw_only=True):
    """The state of a front.

    `num_streams`: calls open now. `num_live`: requests not released. `num_backlog_tokens`: output
    that readers have not taken. `loop_lag_s`: how late the event loop ran each of its ticks since
    the last beat, one value a tick. `queue_estimate_s`: what the engine foretold the newest request
    that it queued for this front, at `queue_estimate_at_s` (monotonic); None: it foretold nothing.
    The rest counts since the front's start; `dropped_records` are those that the observer did not
    take, by reason.
    """

    front_id: int
    pid: int
    epoch: int
    is_draining: bool
    is_engine_up: bool
    num_streams: int
    num_live: int
    num_backlog_tokens: int
    num_submitted: int
    num_cut_readers: int
    num_late_events: int
    num_unknown_fields: int
    num_internal_errors: int
    num_records: int
    dropped_records: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    outcomes: tuple[OutcomeCount, ...] = ()
    loop_lag_s: tuple[float, ...] = ()
    queue_estimate_s: float | None = None
    queue_estimate_at_s: float = -math.inf
