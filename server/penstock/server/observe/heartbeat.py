"""A front's heartbeat: its state once a second, and the lag of its event loop.

Owns the value and the timer. Counters are cumulative, so a lost heartbeat loses no counts. The lag
of a tick also delayed every stream of the front.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from penstock.server.link.wire import TaggedFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeCount:
    """Number of requests with one outcome. Fields as in `RequestRecord`.

    `finish_reason`: of the first output, empty if there is none.
    """

    method: str
    code: int
    reason: str
    finish_reason: str
    num: int


class Heartbeat(TaggedFrame, frozen=True, kw_only=True):
    """The state of a front.

    `num_streams`: open calls. `num_live`: requests not released. `num_backlog_tokens`: output that
    clients have not read. `loop_lag_s`: lag of the event loop at each tick since the last
    heartbeat. `queue_estimate_s`: the predicted wait of the newest queued request of this front, at
    `queue_estimate_at_s` (monotonic); None: not predicted. All other fields count since the front's
    start; `dropped_records`: records that were not delivered, by reason.
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
    num_lowered_priorities: int = 0
    dropped_records: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    outcomes: tuple[OutcomeCount, ...] = ()
    loop_lag_s: tuple[float, ...] = ()
    queue_estimate_s: float | None = None
    queue_estimate_at_s: float = -math.inf


_TICK_S = 0.1
_NUM_TICKS_PER_BEAT = 10


class HeartbeatTimer:
    """Calls `beat` once a second with the lateness of each tick since, seconds.

    `clock` gives monotonic seconds; not the loop's time, which stands still while a callback runs.
    """

    def __init__(
        self,
        beat: Callable[[tuple[float, ...]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._beat = beat
        self._clock = clock
        self._lags_s: list[float] = []
        self._due_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Tick on the running loop until `stop`. The first heartbeat is immediate."""
        self._beat(())
        self._due_s = self._clock()
        self._wait()

    def stop(self) -> None:
        """Stop after a last heartbeat. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
            self._send()

    def _wait(self) -> None:
        now_s = self._clock()
        # Ticks missed by a blocked loop count as one late tick.
        self._due_s = max(self._due_s, now_s - _TICK_S) + _TICK_S
        delay_s = max(0.0, self._due_s - now_s)
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._lags_s.append(max(0.0, self._clock() - self._due_s))
        if len(self._lags_s) >= _NUM_TICKS_PER_BEAT:
            self._send()
        self._wait()

    def _send(self) -> None:
        lags_s, self._lags_s = tuple(self._lags_s), []
        self._beat(lags_s)
