"""What became of a soak's requests, as its clients know it.

Owns the outcomes and their sums. Does not judge them.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from dataclasses import dataclass, field

OK = ""
HUNG = "hung"


class Kind(enum.StrEnum):
    """What a request was for."""

    STEADY = "steady"
    CANCEL = "cancel"
    SLOW = "slow reader"
    POISON = "poison"
    BURST = "burst"
    CANARY = "canary"
    DEADLY = "deadly prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one request. `cause`: "" when it ended as it should.

    Times are monotonic seconds; `first_token_s` None if it got none. `was_shed`: refused for want
    of room, which is no error. `num_refusals`: how often it was asked to come back, and did.
    """

    kind: Kind
    cause: str
    begun_s: float
    ended_s: float
    first_token_s: float | None = None
    num_tokens: int = 0
    num_resumes: int = 0
    num_refusals: int = 0
    was_shed: bool = False


@dataclass(slots=True)
class Minute:
    """Requests that ended within it and were not shed, and how many of them were errors."""

    num: int = 0
    num_errors: int = 0

    @property
    def error_rate(self) -> float:
        return self.num_errors / max(1, self.num)


@dataclass(slots=True)
class Ledger:
    """Everything a soak's clients were reported. `wrong`: tokens or numbers that must not be.

    Sums alone are kept, and the causes of errors: it may be fed for hours.
    """

    begun_s: float = field(default_factory=time.monotonic)
    wrong: list[str] = field(default_factory=list[str])
    num: Counter[Kind] = field(default_factory=Counter[Kind])
    causes: Counter[tuple[Kind, str]] = field(default_factory=Counter[tuple[Kind, str]])
    num_shed: int = 0
    num_resumed: int = 0
    num_refusals: int = 0
    num_tokens: int = 0
    _minutes: dict[int, Minute] = field(default_factory=dict[int, Minute])

    def add(self, outcome: Outcome) -> None:
        """A request ended."""
        self.num[outcome.kind] += 1
        self.num_resumed += bool(outcome.num_resumes)
        self.num_refusals += outcome.num_refusals
        self.num_tokens += outcome.num_tokens
        if outcome.cause:
            self.causes[outcome.kind, outcome.cause] += 1
        if outcome.was_shed:
            self.num_shed += 1
            return
        minute = self._minutes.setdefault(int((outcome.ended_s - self.begun_s) // 60), Minute())
        minute.num += 1
        minute.num_errors += bool(outcome.cause)

    @property
    def num_requests(self) -> int:
        return self.num.total()

    @property
    def num_errors(self) -> int:
        """Requests that did not end as they should."""
        return self.causes.total()

    @property
    def error_rate(self) -> float:
        """Share of errors among all requests that were not shed."""
        return self.num_errors / max(1, self.num_requests - self.num_shed)

    @property
    def worst_minute(self) -> float:
        """The largest share of errors among the requests that ended within one minute."""
        return max((minute.error_rate for minute in self._minutes.values()), default=0.0)

    def num_failed(self, kind: Kind) -> int:
        """Requests of a kind that did not end as they should."""
        return sum(count for (failed, _), count in self.causes.items() if failed is kind)

    def num_caused_by(self, text: str) -> int:
        """Errors with that in their cause."""
        return sum(count for (_, cause), count in self.causes.items() if text in cause)
