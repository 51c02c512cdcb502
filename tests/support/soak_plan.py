"""What a soak does and when: sizes, shares, and a seeded schedule of faults.

Owns the numbers. Knows no process and no socket.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass


class Strike(enum.StrEnum):
    """What is done to a service under load."""

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
"""How often the engine dies of it: a prompt is only known to be deadly at its second victim."""
MAX_DEATHS = 4
"""Within DEATH_WINDOW_S. One more, and the service gives up, as it should."""
DEATH_WINDOW_S = 65.0
TRIAL_S = 15.0
"""As long as those are tried one by one who were with an engine that ended by its own fault. An
engine that is struck then looks killed by the one on trial, a caller that that is."""
_OWN_FAULT = (Strike.DEADLY_PROMPT, Strike.ENGINE_HANG)
_NEED_SCRIPT = frozenset({Strike.DEADLY_PROMPT})
_TAKE_LONG = frozenset({Strike.ROLLING_RESTART})
_LONG_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """One soak. Shares are of all requests.

    `num_streams` run at all times, `num_held` more in client processes that are struck;
    `burst_size` at once every `burst_every_s`. After `seconds` nothing new is asked, and what runs
    has `settle_s` to end. `is_torch`: the demo model in place of the simulated one, which has no
    scripted faults.
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
        """Requests that may be alive at once, apart from bursts."""
        return self.num_streams + 2 * self.num_held + 8


def full_plan(seed: int, minutes: float, *, is_torch: bool) -> SoakPlan:
    """The long one: 64 streams, bursts of 256."""
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
    """When to fault, seconds from the start, and how: everything once before anything again.

    A fault that would kill the engine too often for the service to continue is put off.
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
