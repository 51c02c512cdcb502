"""Measures the time that a request spends in its phases: queue, prefill and decode.

Computes the state, the total duration of each phase, and the segments of a record from admissions,
preemptions and tokens. All times are arguments, in seconds on the engine's clock.

A request with several outputs waits only while none of them runs. The engine's details (`Wait`,
`Residency`) describe the first output.
"""

from typing import Final

from penstock.scheduler.events import Residency, Wait
from penstock.scheduler.state import RequestState
from penstock.server.observe.request_record import Segment, SegmentKind

PREPARE: Final = SegmentKind.PREPARE
QUEUE: Final = SegmentKind.QUEUE
PREFILL: Final = SegmentKind.PREFILL
DECODE: Final = SegmentKind.DECODE
DELIVER: Final = SegmentKind.DELIVER


class PhaseClock:
    """Measures the time that one request spends in each phase. The request begins at `now_s` with
    its preparation.

    `phase` is the phase that the client sees: QUEUE, PREFILL or DECODE. QUEUE includes the
    preparation before submission. After `stop` the phase no longer changes, although the engine may
    still run an output for a moment.

    `segments` is the detailed timeline, oldest first. The first segment is PREPARE, and `stop` adds
    the last one, DELIVER. The end of the last segment is set only by `segments_until`.
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
        """The state: PENDING while in the queue, PROCESSING otherwise."""
        return RequestState.PENDING if self.phase is QUEUE else RequestState.PROCESSING

    def spent_s(self, phase: SegmentKind) -> float:
        """Return the seconds spent in `phase`, up to the last change of the phase."""
        return self._spent_s[phase]

    def note_submitted(self, now_s: float) -> None:
        """Start the wait in the engine's queue, because the request is submitted."""
        self._since_s = max(now_s, self._since_s)
        self._begin(QUEUE)

    def note_admitted(
        self, now_s: float, *, num_cached_tokens: int = 0, wait: Wait | None = None
    ) -> bool:
        """Record that one more output has started to run. Returns True if the state of the request
        changed.

        `num_cached_tokens` and `wait` are used only if the state changes.
        """
        self._num_running += 1
        if self.phase is not QUEUE or self._is_over:
            return False
        self.add_details(wait=wait)
        self._enter(PREFILL, now_s)
        self.segments[-1].num_cached_tokens = num_cached_tokens
        return True

    def note_stopped(self, now_s: float, *, has_more: bool, num_tokens: int = 0) -> bool:
        """Record that an output stopped running. Returns True if the request waits again.

        `has_more` is True if some outputs have not ended. `num_tokens` is the number of output
        tokens so far.
        """
        self._num_running = max(0, self._num_running - 1)
        if self._num_running or not has_more or self.phase is QUEUE or self._is_over:
            return False
        self._count(self.segments[-1], num_tokens)
        self._enter(QUEUE, now_s)
        return True

    def note_engine_lost(self, now_s: float, *, num_tokens: int) -> bool:
        """Record the loss of the engine. Returns True if the state of the request changed.

        `num_tokens` is the number of output tokens so far.
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

    def note_resubmitted(self, now_s: float) -> None:
        """Start another wait in the queue, because the request was submitted again."""
        if not self._is_over:
            self._enter(QUEUE, now_s)

    def note_token(self, now_s: float) -> None:
        """Record a sampled token. The first token ends the prefill phase and starts the decode
        phase."""
        if self.phase is PREFILL and not self._is_over:
            self._enter(DECODE, now_s)

    def note_prefix(self, num_cached_tokens: int) -> None:
        """Record the number of cached tokens of the prompt that is being computed. Does nothing
        outside the prefill phase."""
        if self.segments[-1].kind is PREFILL:
            self.segments[-1].num_cached_tokens = num_cached_tokens

    def add_details(self, *, wait: Wait | None = None, residency: Residency | None = None) -> None:
        """Add to the segments the engine's details of the latest queue wait (`wait`) and of the
        latest time in the running batch (`residency`). None adds nothing, and a `wait` that was
        added before is not replaced."""
        if wait is not None:
            segment = self._latest(QUEUE)
            if segment is not None and segment.wait is None:
                segment.wait = wait
        if residency is not None:
            segment = self._latest(DECODE, PREFILL)
            if segment is not None:
                segment.residency = residency

    def stop(self, now_s: float) -> None:
        """End the current phase, because the request has ended. The time after it is delivery."""
        if self._is_over:
            return
        self._add(now_s)
        self._is_over = True
        self._begin(DELIVER)

    def segments_until(self, end_s: float, *, num_tokens: int) -> tuple[Segment, ...]:
        """Return all segments up to `end_s`. `num_tokens` is the number of output tokens until
        then.

        No segment may begin after `end_s`. Segments of zero length are left out; if all have zero
        length, one of the first kind is returned. The `residency` of a segment that is left out
        moves to the preceding PREFILL or DECODE segment. The first token after a prefill is counted
        in the DECODE segment, although the prefill computed it.
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
            elif segment.residency is not None and found and found[-1].kind in (PREFILL, DECODE):
                found[-1].residency = segment.residency
        return tuple(found) or (Segment(segments[0].kind, segments[0].start_s, end_s),)

    def _count(self, segment: Segment, num_tokens: int) -> None:
        """Set the number of output tokens of a DECODE segment that a preemption or the loss of an
        engine has ended."""
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
        # Times are read by both the front and the engine, but no phase may have a negative length.
        now_s = max(now_s, self._since_s)
        self._spent_s[self.phase] += now_s - self._since_s
        self._since_s = now_s
