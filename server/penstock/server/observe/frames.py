"""Frames between a front and the observer process, and a front's heartbeat.

Owns the frame types, and the timer that makes a heartbeat once a second. Its counters are
cumulative, so a lost heartbeat loses no counts; the lag of a tick also delayed every stream of the
front. Records are bytes, so that an unreadable one does not affect others. Does not know sockets.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from penstock.server.link.frames import Command, CommandResult
from penstock.server.link.wire import Codec, TaggedFrame

_TICK_S = 0.1
_NUM_TICKS_PER_BEAT = 10


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
    `queue_estimate_at_s` (monotonic); None: not predicted. All other fields are totals since the
    front's start; `dropped_records`: records that were not delivered, by reason.
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


class HeartbeatTimer:
    """Calls `beat` once a second with the lag of each tick since the last call, in seconds.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontView:
    """A request that has not been released.

    `keys`: the engine's keys of the outputs, empty during preparation. `phase`: the value of a
    `SegmentKind`; `history`: every phase with its start time, oldest first. `trace_id`: 32
    hexadecimal digits. `num_backlog_tokens`: output that its client has not read.
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


class Hello(TaggedFrame, frozen=True, kw_only=True):
    """A front's first frame. `front_id` is unique to this process of the front."""

    front_id: int
    pid: int


class Records(TaggedFrame, frozen=True, kw_only=True):
    """Requests that have ended, oldest first, encoded by `encode_record`."""

    payloads: tuple[bytes, ...]


class LiveQuery(TaggedFrame, frozen=True, kw_only=True):
    """Query for live requests. The answer has the same `ticket` (32 bits)."""

    ticket: int


class LiveAnswer(TaggedFrame, frozen=True, kw_only=True):
    """Live requests of a front, in parts; the answer with `is_last` is the last part."""

    ticket: int
    views: tuple[FrontView, ...]
    is_last: bool = True


ObserverFrame: TypeAlias = (
    Hello | Records | Heartbeat | LiveQuery | LiveAnswer | Command | CommandResult
)

_CODEC: Codec[ObserverFrame] = Codec(ObserverFrame)
encode = _CODEC.encode
decode = _CODEC.decode
