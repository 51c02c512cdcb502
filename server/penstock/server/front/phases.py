"""Where a request's time goes: queue, prefill, decode.

Owns the clockwork that turns admissions, preemptions and tokens into a state and three sums. Takes
every time as an argument, in seconds on the engine's clock, and knows no clock of its own.

With several outputs the request is as far as its foremost output: it waits only while none of its
outputs runs.
"""

import enum

from penstock.scheduler.state import RequestState


class Phase(enum.Enum):
    """What a live request is doing."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


class PhaseClock:
    """The sums of one request. Starts in the queue at `now_s`."""

    __slots__ = ("_num_running", "_since_s", "_spent_s", "phase")

    def __init__(self, now_s: float) -> None:
        self.phase = Phase.QUEUE
        self._since_s = now_s
        self._spent_s = {Phase.QUEUE: 0.0, Phase.PREFILL: 0.0, Phase.DECODE: 0.0}
        self._num_running = 0

    @property
    def state(self) -> RequestState:
        """PENDING while in the queue, PROCESSING otherwise."""
        return RequestState.PENDING if self.phase is Phase.QUEUE else RequestState.PROCESSING

    def spent_s(self, phase: Phase) -> float:
        """Time spent in `phase`, up to the last change."""
        return self._spent_s[phase]

    def admit(self, now_s: float) -> bool:
        """One more output runs. True when the request's state changed."""
        self._num_running += 1
        if self.phase is not Phase.QUEUE:
            return False
        self._enter(Phase.PREFILL, now_s)
        return True

    def leave(self, now_s: float, *, has_more: bool) -> bool:
        """An output stopped running. True when the request, having more, waits again."""
        self._num_running = max(0, self._num_running - 1)
        if self._num_running or not has_more or self.phase is Phase.QUEUE:
            return False
        self._enter(Phase.QUEUE, now_s)
        return True

    def token(self, now_s: float) -> None:
        """A token came: what was prefill is decode from now on."""
        if self.phase is Phase.PREFILL:
            self._enter(Phase.DECODE, now_s)

    def stop(self, now_s: float) -> None:
        """The request ended; closes the running sum."""
        self._enter(self.phase, now_s)

    def _enter(self, phase: Phase, now_s: float) -> None:
        # The front stamps its own times and the engine stamps others: never let one run backwards.
        now_s = max(now_s, self._since_s)
        self._spent_s[self.phase] += now_s - self._since_s
        self._since_s = now_s
        self.phase = phase
