"""The phases of a request: queue, prefill, decode.

Turns admissions, preemptions and tokens into a state, three sums, and the list of marks from which
`segments_of` makes the segments of a record. Takes every time as an argument, in seconds on the
engine's clock, and reads no clock.

A request with several outputs waits only while none of them runs. The engine's details are those of
its first output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.scheduler.events import Stay, Wait
from penstock.scheduler.state import RequestState
from penstock.server.observe.request_record import Segment, SegmentKind

PREPARE: Final = SegmentKind.PREPARE
QUEUE: Final = SegmentKind.QUEUE
PREFILL: Final = SegmentKind.PREFILL
DECODE: Final = SegmentKind.DECODE
DELIVER: Final = SegmentKind.DELIVER


@dataclass(slots=True, eq=False)
class Mark:
    """The start of a phase, which lasts until the next mark, and details of the phase.

    `num_tokens_by_then`: of output, at the end of a phase that ended by a preemption; -1 otherwise.
    `is_engine_lost`: waiting without an engine, so in no queue.
    """

    kind: SegmentKind
    since_s: float
    wait: Wait | None = None
    stay: Stay | None = None
    num_cached_tokens: int = 0
    num_tokens_by_then: int = -1
    is_engine_lost: bool = False


class PhaseClock:
    """The sums of one request. Starts in the queue at `now_s`.

    `phase`: what the request is doing, QUEUE, PREFILL or DECODE. `marks`: every phase so far,
    oldest first; before it is submitted that is its preparation, which counts as waiting for its
    client. After `stop` nothing changes: an output may run in the engine for a moment longer.
    """

    __slots__ = ("_is_over", "_num_running", "_since_s", "_spent_s", "marks", "phase")

    def __init__(self, now_s: float) -> None:
        self.phase = QUEUE
        self.marks = [Mark(PREPARE, now_s)]
        self._since_s = now_s
        self._spent_s = {QUEUE: 0.0, PREFILL: 0.0, DECODE: 0.0}
        self._num_running = 0
        self._is_over = False

    @property
    def state(self) -> RequestState:
        """PENDING while in the queue, PROCESSING otherwise."""
        return RequestState.PENDING if self.phase is QUEUE else RequestState.PROCESSING

    def spent_s(self, phase: SegmentKind) -> float:
        """Time spent in `phase`, up to the last change."""
        return self._spent_s[phase]

    def submit(self, now_s: float) -> None:
        """The request is submitted: from now on it waits in the engine's queue."""
        self._since_s = max(now_s, self._since_s)
        self.marks.append(Mark(QUEUE, self._since_s))

    def admit(self, now_s: float, *, num_cached_tokens: int = 0, wait: Wait | None = None) -> bool:
        """One more output runs. True when the request's state changed.

        `num_cached_tokens` and `wait`: of an admission that changes it.
        """
        self._num_running += 1
        if self.phase is not QUEUE or self._is_over:
            return False
        self.explain(wait=wait)
        self._enter(PREFILL, now_s)
        self.marks[-1].num_cached_tokens = num_cached_tokens
        return True

    def leave(self, now_s: float, *, has_more: bool, num_tokens: int = 0) -> bool:
        """An output stopped running. True when the request, having more, waits again.

        `num_tokens`: of output, so far.
        """
        self._num_running = max(0, self._num_running - 1)
        if self._num_running or not has_more or self.phase is QUEUE or self._is_over:
            return False
        self.marks[-1].num_tokens_by_then = num_tokens
        self._enter(QUEUE, now_s)
        return True

    def lose(self, now_s: float, *, num_tokens: int) -> bool:
        """The engine is lost. True when the request's state changed.

        `num_tokens`: of output, so far.
        """
        self._num_running = 0
        if self._is_over:
            return False
        was_running = self.phase is not QUEUE
        if was_running:
            self.marks[-1].num_tokens_by_then = num_tokens
        self._enter(QUEUE, now_s)
        self.marks[-1].is_engine_lost = True
        return was_running

    def resubmit(self, now_s: float) -> None:
        """Another engine gets the request: it waits in a queue again."""
        if not self._is_over:
            self._enter(QUEUE, now_s)

    def token(self, now_s: float) -> None:
        """A token was sampled: prefill has ended, decode has begun."""
        if self.phase is PREFILL and not self._is_over:
            self._enter(DECODE, now_s)

    def find_prefix(self, num_cached_tokens: int) -> None:
        """The cached tokens of the prompt that is computed now."""
        if self.marks[-1].kind == PREFILL:
            self.marks[-1].num_cached_tokens = num_cached_tokens

    def explain(self, *, wait: Wait | None = None, stay: Stay | None = None) -> None:
        """The engine's details on the latest wait in its queue, and on the latest residency in its
        batch.
        """
        if wait is not None:
            mark = self._latest(QUEUE)
            if mark is not None and mark.wait is None:
                mark.wait = wait
        if stay is not None:
            mark = self._latest(DECODE, PREFILL)
            if mark is not None:
                mark.stay = stay

    def stop(self, now_s: float) -> None:
        """The request ended; close the running sum; the rest of the time is delivery."""
        if self._is_over:
            return
        self._add(now_s)
        self._is_over = True
        self.marks.append(Mark(DELIVER, self._since_s))

    def _latest(self, *kinds: str) -> Mark | None:
        return next((mark for mark in reversed(self.marks) if mark.kind in kinds), None)

    def _enter(self, phase: SegmentKind, now_s: float) -> None:
        self._add(now_s)
        self.phase = phase
        self.marks.append(Mark(phase, self._since_s))

    def _add(self, now_s: float) -> None:
        # The front's clock readings and the engine's are compared: no phase may have a negative
        # length.
        now_s = max(now_s, self._since_s)
        self._spent_s[self.phase] += now_s - self._since_s
        self._since_s = now_s


def segments_of(marks: Sequence[Mark], *, end_s: float, num_tokens: int) -> tuple[Segment, ...]:
    """The segments from the first mark to `end_s`; `num_tokens`: of output, by then.

    Marks are in order of time, none of them after `end_s`. An empty phase is left out, except that
    there is always one segment; the details of a residency in the batch then go to the part of it
    that is left. The first token of a residency counts to its DECODE, though computed before.
    """
    segments: list[Segment] = []
    num_counted = 0
    upcoming = iter(marks)
    next(upcoming)
    for mark in marks:
        following = next(upcoming, None)
        since_s, until_s = mark.since_s, end_s if following is None else following.since_s
        wait, stay, num_new = mark.wait, mark.stay, 0
        if mark.kind == DECODE:
            num_by_then = num_tokens if mark.num_tokens_by_then < 0 else mark.num_tokens_by_then
            num_new, num_counted = num_by_then - num_counted, num_by_then
        if until_s > since_s:
            segments.append(
                Segment(
                    mark.kind,
                    since_s,
                    until_s,
                    wait,
                    stay,
                    mark.num_cached_tokens,
                    num_new,
                    mark.is_engine_lost,
                )
            )
        elif stay is not None and segments and segments[-1].kind in (PREFILL, DECODE):
            segments[-1] = msgspec.structs.replace(segments[-1], stay=stay)
    return tuple(segments) or (Segment(marks[0].kind, marks[0].since_s, end_s),)
