"""What all fronts have told of themselves, added up over every front that there was.

Owns the last beat of each life of a front. A front that dies keeps its counts and loses its
gauges; one that is heard again after it seemed gone counts once.
"""

from collections import Counter
from collections.abc import Iterable

from penstock.server.error_reason import REFUSALS
from penstock.server.observe.heartbeat import Heartbeat, OutcomeCount
from penstock.server.observe.operations.snapshot import FrontSnapshot

MAX_LIVES = 256
"""Ended lives that are kept apart; the counts of older ones are added up."""

_OK, _CANCELLED = 0, 1
_CANCELLED_NAME = "CANCELLED"


class FrontLives:
    """Takes beats. `counts` holds accepted, refused, completed, cancelled and failed requests."""

    def __init__(self) -> None:
        self._beats: dict[tuple[int, int], Heartbeat] = {}
        self._pid_of: dict[int, int] = {}
        self._past: Counter[str] = Counter()

    def take(self, beat: Heartbeat) -> None:
        """A front lives."""
        life = (beat.front_id, beat.pid)
        # The newest last, so that the oldest lives are forgotten first.
        self._beats.pop(life, None)
        self._beats[life] = beat
        self._pid_of[beat.front_id] = beat.pid
        self._forget_old()

    def gone(self, front_id: int) -> None:
        """A front does not live any more."""
        self._pid_of.pop(front_id, None)

    @property
    def living(self) -> tuple[Heartbeat, ...]:
        """The last beat of each front that lives, by its id."""
        return tuple(self._beats[life] for life in sorted(self._pid_of.items()))

    @property
    def counts(self) -> Counter[str]:
        """Over all fronts that there were."""
        total = Counter(self._past)
        for beat in self._beats.values():
            total.update(_counts_of(beat))
        return total

    def views(self) -> tuple[FrontSnapshot, ...]:
        """Each front that lives."""
        return tuple(
            FrontSnapshot(
                index=beat.front_id,
                pid=beat.pid,
                num_streams=beat.num_streams,
                num_live=beat.num_live,
                num_backlog_tokens=beat.num_backlog_tokens,
            )
            for beat in self.living
        )

    def _forget_old(self) -> None:
        living = set(self._pid_of.items())
        ended = [life for life in self._beats if life not in living]
        for life in ended[: max(0, len(ended) - MAX_LIVES)]:
            self._past.update(_counts_of(self._beats.pop(life)))


def _counts_of(beat: Heartbeat) -> Counter[str]:
    counts = Counter({"accepted": beat.num_submitted})
    for kind, num in _kinds(beat.outcomes):
        counts[kind] += num
    return counts


def _kinds(outcomes: Iterable[OutcomeCount]) -> Iterable[tuple[str, int]]:
    """Cancelled requests are completed ones too."""
    for outcome in outcomes:
        is_cancelled = outcome.code == _CANCELLED or outcome.finish_reason == _CANCELLED_NAME
        if is_cancelled:
            yield "cancelled", outcome.num
        if is_cancelled or outcome.code == _OK:
            yield "completed", outcome.num
        elif outcome.reason in REFUSALS:
            yield "refused", outcome.num
        else:
            yield "failed", outcome.num
