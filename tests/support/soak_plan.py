"""The schedule of a soak, and the ends of its requests."""

from __future__ import annotations

import enum
import random
import time
from collections import Counter
from dataclasses import dataclass, field

# What a soak does and when: sizes, shares, and a seeded schedule of faults.


class Strike(enum.StrEnum):
    """A fault that is injected into a service under load."""

    ENGINE_KILL = "engine killed"
    ENGINE_HANG = "engine stopped for good"
    ENGINE_PAUSE = "engine stopped for a second"
    DEADLY_PROMPT = "prompt that kills the engine"
    FRONT_KILL = "front killed"
    FRONT_PAUSE = "front stopped for a second"
    CONNECTIONS_LOST = "connections lost"
    CLIENT_KILL = "client killed"
    CLIENT_STOP = "client stopped, then killed"
    ROLLING_RESTART = "rolling restart"


DEATHS = {Strike.ENGINE_KILL: 1, Strike.ENGINE_HANG: 1, Strike.DEADLY_PROMPT: 2}
"""How often the fault kills the engine: a prompt is known to be deadly only after its second
crash.
"""
MAX_DEATHS = 4
"""The limit within DEATH_WINDOW_S. With one more the service gives up, as it should."""
DEATH_WINDOW_S = 65.0
TRIAL_S = 15.0
"""Probation of the requests in an engine that failed by itself, which then run one by one. An
engine that is killed in this time would be attributed to the request on probation.
"""
_OWN_FAULT = (Strike.DEADLY_PROMPT, Strike.ENGINE_HANG)
_NEED_SCRIPT = frozenset({Strike.DEADLY_PROMPT})
_TAKE_LONG = frozenset({Strike.ROLLING_RESTART})
_LONG_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """One soak. Shares are of all requests.

    `num_streams` run at all times, `num_held` more in client processes that are faulted;
    `burst_size` start at once every `burst_every_s`. After `seconds` nothing new is sent, and
    running requests have `settle_s` to end. `is_torch`: the demo model in place of the simulated
    one, without scripted faults.
    """

    seconds: float = 300.0
    seed: int = 1
    num_streams: int = 16
    num_held: int = 8
    burst_size: int = 64
    burst_every_s: float = 15.0
    canary_every_s: float = 5.0
    first_strike_s: float = 3.0
    strike_every_s: float = 7.0
    settle_s: float = 60.0
    cancel_share: float = 0.10
    slow_share: float = 0.01
    poison_share: float = 0.01
    resumable_share: float = 0.95
    min_tokens: int = 10
    max_tokens: int = 80
    is_torch: bool = False

    @property
    def max_concurrent(self) -> int:
        """Return how many requests may be live at once, without bursts."""
        return self.num_streams + 2 * self.num_held + 8


def full_plan(seed: int, minutes: float, *, is_torch: bool) -> SoakPlan:
    """Return the long plan: 64 streams, bursts of 256."""
    return SoakPlan(
        seconds=minutes * 60,
        seed=seed,
        num_streams=64,
        num_held=16,
        burst_size=256,
        burst_every_s=60.0,
        strike_every_s=20.0,
        is_torch=is_torch,
    )


def schedule(plan: SoakPlan) -> list[tuple[float, Strike]]:
    """Return when to inject which fault, seconds from the start: each once before any again.

    A fault that would exceed the engine deaths that the service tolerates is postponed.
    """
    chance = random.Random(plan.seed)
    deaths: list[float] = []
    told: list[tuple[float, Strike]] = []
    deck: list[Strike] = []
    at_s = plan.first_strike_s
    while at_s < plan.seconds - plan.strike_every_s:
        if not deck:
            deck = [strike for strike in Strike if _is_played(strike, plan)]
            chance.shuffle(deck)
        recent = sum(time_s > at_s - DEATH_WINDOW_S for time_s in deaths)
        is_on_trial = any(
            strike in _OWN_FAULT and time_s > at_s - TRIAL_S for time_s, strike in told
        )
        most = 0 if is_on_trial else MAX_DEATHS - recent
        fits = [strike for strike in deck if DEATHS.get(strike, 0) <= most]
        if fits:
            strike = fits[0]
            deck.remove(strike)
            deaths += [at_s] * DEATHS.get(strike, 0)
            told.append((at_s, strike))
        at_s += plan.strike_every_s
    return told


def _is_played(strike: Strike, plan: SoakPlan) -> bool:
    if plan.is_torch and strike in _NEED_SCRIPT:
        return False
    return plan.seconds >= _LONG_S or strike not in _TAKE_LONG


# What became of a soak's requests, as its clients know it.

OK = ""
HUNG = "hung"


class Kind(enum.StrEnum):
    """The purpose of a request."""

    STEADY = "steady"
    CANCEL = "cancel"
    SLOW = "slow reader"
    POISON = "poison"
    BURST = "burst"
    CANARY = "canary"
    DEADLY = "deadly prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one request. `cause`: "" when it ended as expected.

    Times are monotonic seconds; `first_token_s` None if it got none. `was_shed`: refused for lack
    of capacity, which is no error. `num_refusals`: how often it was asked to retry, and did.
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
    """All outcomes of a soak. `wrong`: invalid tokens or numbers.

    Keeps only sums and the causes of errors, so it can run for hours.
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
        """Return how many requests did not end as expected."""
        return self.causes.total()

    @property
    def error_rate(self) -> float:
        """Return the share of errors among all requests that were not shed."""
        return self.num_errors / max(1, self.num_requests - self.num_shed)

    @property
    def worst_minute(self) -> float:
        """Return the largest share of errors among the requests that ended within one minute."""
        return max((minute.error_rate for minute in self._minutes.values()), default=0.0)

    def num_failed(self, kind: Kind) -> int:
        """Return how many requests of a kind did not end as expected."""
        return sum(count for (failed, _), count in self.causes.items() if failed is kind)

    def num_caused_by(self, text: str) -> int:
        """Return how many errors contain this text in their cause."""
        return sum(count for (_, cause), count in self.causes.items() if text in cause)
