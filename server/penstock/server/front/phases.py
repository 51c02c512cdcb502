"""The phases of a request: queue, prefill, decode.

Turns admissions, preemptions and tokens into a state, three total durations, and the segments of a
record. Takes every time as an argument, in seconds on the engine's clock, and reads no clock.

A request with several outputs waits only while none of them runs. The engine's details are those of
its first output.
"""

from typing import Final

from penstock.scheduler.events import Stay, Wait
from penstock.scheduler.state import RequestState
from penstock.server.observe.request_record import Segment, SegmentKind

PREPARE: Final = SegmentKind.PREPARE
QUEUE: Final = SegmentKind.QUEUE
PREFILL: Final = SegmentKind.PREFILL
DECODE: Final = SegmentKind.DECODE
DELIVER: Final = SegmentKind.DELIVER


class PhaseClock:
    """The time that one request spends in each phase. Starts in the queue at `now_s`.

    `phase`: the current phase, QUEUE, PREFILL or DECODE. `segments`: every phase so far, oldest
    first; the last one has no length yet. Before submission that is its preparation, which counts
    as waiting for its client. After `stop` nothing changes: an output may run in the engine for a
    moment longer.
    """

    __slots__ = (
        *("_is_over", "_num_counted", "_num_running", "_since_s", "_spent_s"),
        *("phase", "segments"),
    )

    def __init__(self, now_s: float) -> None:
        self.phase = QUEUE
        self.segments = [Segment(PREPARE, now_s, now_s)]
        self._since_s = now_s
        self._spent_s = {QUEUE: 0.0, PREFILL: 0.0, DECODE: 0.0}
        self._num_running = self._num_counted = 0
        self._is_over = False

    @property
    def state(self) -> RequestState:
        """PENDING while in the queue, PROCESSING otherwise."""
        return RequestState.PENDING if self.phase is QUEUE else RequestState.PROCESSING

    def spent_s(self, phase: SegmentKind) -> float:
        """Return the time spent in `phase`, up to the last change."""
        return self._spent_s[phase]

    def submit(self, now_s: float) -> None:
        """Begin the wait in the engine's queue: the request is submitted."""
        self._since_s = max(now_s, self._since_s)
        self._begin(QUEUE)

    def admit(self, now_s: float, *, num_cached_tokens: int = 0, wait: Wait | None = None) -> bool:
        """Record that one more output runs. Return True if the request's state changed.

        `num_cached_tokens` and `wait`: of an admission that changes it.
        """
        self._num_running += 1
        if self.phase is not QUEUE or self._is_over:
            return False
        self.explain(wait=wait)
        self._enter(PREFILL, now_s)
        self.segments[-1].num_cached_tokens = num_cached_tokens
        return True

    def leave(self, now_s: float, *, has_more: bool, num_tokens: int = 0) -> bool:
        """Record that an output stopped running. Return True if the request waits again.

        `has_more`: not all outputs have ended. `num_tokens`: output tokens so far.
        """
        self._num_running = max(0, self._num_running - 1)
        if self._num_running or not has_more or self.phase is QUEUE or self._is_over:
            return False
        self._count(self.segments[-1], num_tokens)
        self._enter(QUEUE, now_s)
        return True

    def lose(self, now_s: float, *, num_tokens: int) -> bool:
        """Record the loss of the engine. Return True if the request's state changed.

        `num_tokens`: output tokens so far.
        """
        self._num_running = 0
        if self._is_over:
            return False
        was_running = self.phase is not QUEUE
        if was_running:
            self._count(self.segments[-1], num_tokens)
        self._enter(QUEUE, now_s)
        self.segments[-1].is_engine_lost = True
        return was_running

    def resubmit(self, now_s: float) -> None:
        """Begin another wait in a queue: another engine gets the request."""
        if not self._is_over:
            self._enter(QUEUE, now_s)

    def token(self, now_s: float) -> None:
        """Record a sampled token: the first one ends prefill and begins decode."""
        if self.phase is PREFILL and not self._is_over:
            self._enter(DECODE, now_s)

    def find_prefix(self, num_cached_tokens: int) -> None:
        """Record the cached tokens of the prompt that is being computed."""
        if self.segments[-1].kind is PREFILL:
            self.segments[-1].num_cached_tokens = num_cached_tokens

    def explain(self, *, wait: Wait | None = None, stay: Stay | None = None) -> None:
        """Add the engine's details on the latest wait in its queue and the latest residency in its
        batch.
        """
        if wait is not None:
            segment = self._latest(QUEUE)
            if segment is not None and segment.wait is None:
                segment.wait = wait
        if stay is not None:
            segment = self._latest(DECODE, PREFILL)
            if segment is not None:
                segment.stay = stay

    def stop(self, now_s: float) -> None:
        """End the current phase: the request has ended, and the rest of the time is delivery."""
        if self._is_over:
            return
        self._add(now_s)
        self._is_over = True
        self._begin(DELIVER)

    def segments_until(self, end_s: float, *, num_tokens: int) -> tuple[Segment, ...]:
        """Return the segments from the first to `end_s`. `num_tokens`: output tokens by then.

        No segment begins after `end_s`. An empty phase is left out, except that there is always one
        segment; the details of a residency in the batch then go to its remaining part. The first
        token of a residency counts towards its DECODE, though computed before.
        """
        segments = self.segments
        segments[-1].end_s = end_s
        foremost = segments[-2 if self._is_over else -1]
        if foremost.kind is DECODE:
            foremost.num_tokens = num_tokens - self._num_counted
        found: list[Segment] = []
        for segment in segments:
            if segment.end_s > segment.start_s:
                found.append(segment)
            elif segment.stay is not None and found and found[-1].kind in (PREFILL, DECODE):
                found[-1].stay = segment.stay
        return tuple(found) or (Segment(segments[0].kind, segments[0].start_s, end_s),)

    def _count(self, segment: Segment, num_tokens: int) -> None:
        """Count the output tokens of a segment that ended by a preemption or a lost engine."""
        if segment.kind is DECODE:
            segment.num_tokens = num_tokens - self._num_counted
            self._num_counted = num_tokens

    def _latest(self, *kinds: str) -> Segment | None:
        return next((segment for segment in reversed(self.segments) if segment.kind in kinds), None)

    def _enter(self, phase: SegmentKind, now_s: float) -> None:
        self._add(now_s)
        self.phase = phase
        self._begin(phase)

    def _begin(self, kind: SegmentKind) -> None:
        since_s = self._since_s
        self.segments[-1].end_s = since_s
        self.segments.append(Segment(kind, since_s, since_s))

    def _add(self, now_s: float) -> None:
        # Times are read by the front and by the engine: no phase may have a negative length.
        now_s = max(now_s, self._since_s)
        self._spent_s[self.phase] += now_s - self._since_s
        self._since_s = now_s
