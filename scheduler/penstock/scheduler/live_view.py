"""One live request as the engine sees it, for operators.

Owns one value. It contains no token and no text.
"""

from dataclasses import dataclass

from penstock.scheduler.events import WaitReason
from penstock.scheduler.state import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """The state of one output of a request. Times are absolute seconds on the engine's clock.

    `waits_for` and `queue_position` (requests ahead of it) only while PENDING; the position is None
    where counting it would cost too much. `slot` -1 while PENDING. `deadline_s`: the earliest open
    one, infinite for none. `num_prompt_tokens` are those of the client's prompt; replayed output
    counts as output. `num_computed_tokens`: with keys and values once every launched step is done.
    """

    key: int
    request_id: str
    tenant: str
    output_index: int
    state: RequestState
    priority: int
    arrival_s: float
    deadline_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    slot: int = -1
    waits_for: WaitReason | None = None
    queue_position: int | None = None
    trace_id: bytes = b""
