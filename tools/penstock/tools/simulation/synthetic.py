"""Generates synthetic traffic: random arrivals, tenants and lengths.

The same settings, including the seed, give the same trace.
"""

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.scheduler.setting import SettingError, check, required, setting
from penstock.server.observe.recording.trace import (
    MAX_ARRIVAL_S,
    MAX_REQUEST_TOKENS,
    TraceRequest,
    check_text,
)
from penstock.tools.simulation.trace_formats import check_unique

MAX_REQUESTS = 1e8
"""Upper bound of the mean number of requests of a trace; so many take days to simulate."""
_MEAN = "mean length of {}s before truncation, tokens"
_SIGMA = "standard deviation of the logarithm of {} lengths; 0: all have the mean length"
_MAX = "length to which longer {}s are truncated, tokens"
_MEAN_BOUNDS: Mapping[str, Any] = {"above": 0, "at_most": MAX_REQUEST_TOKENS}
_MAX_BOUNDS: Mapping[str, Any] = {"at_least": 1, "at_most": MAX_REQUEST_TOKENS}


class ArrivalProcess(enum.StrEnum):
    """The arrival process.

    POISSON: exponentially distributed gaps. GAMMA: gamma-distributed gaps with coefficient of
    variation `burstiness` (1 is Poisson). MMPP: a Poisson process whose rate switches between a
    calm state and a burst of `burstiness` times the calm rate, each lasting `mean_state_s` on
    average (a Markov-modulated Poisson process).
    """

    POISSON = "poisson"
    GAMMA = "gamma"
    MMPP = "mmpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """A tenant and its relative share of the requests. Raises ValueError, naming the field, if one
    is invalid.
    """

    name: str = required(text="tenant of requests")
    share: float = setting(
        1.0,
        text="its share of the requests, relative to the other tenants",
        at_least=1e-9,
        at_most=1e9,
    )

    def __post_init__(self) -> None:
        check(self)
        check_text("name", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticConfig:
    """Settings of a synthetic trace. Raises ValueError, naming the field, if one is invalid.

    Lengths are lognormal and clipped to 1 .. `max_..._tokens`. `tenants`: empty for requests
    without a tenant.
    """

    rate_per_s: float = setting(
        2.0, text="mean number of requests per second; at most 1e8 in the whole trace", above=0
    )
    duration_s: float = setting(
        600.0, text="length of the trace, seconds", above=0, at_most=MAX_ARRIVAL_S
    )
    arrivals: ArrivalProcess = setting(
        ArrivalProcess.POISSON,
        text="arrival process: gaps with an exponential (poisson) or a gamma distribution, or"
        " a Poisson process that switches between a calm state and a burst (mmpp)",
    )
    burstiness: float = setting(
        4.0,
        text="gamma: coefficient of variation of the gaps; mmpp: rate of a burst, relative to the"
        " calm rate",
        at_least=0.01,
        at_most=1000,
    )
    mean_state_s: float = setting(30.0, text="mmpp: mean duration of a state, seconds", above=0)
    mean_prompt_tokens: float = setting(512.0, text=_MEAN.format("prompt"), **_MEAN_BOUNDS)
    prompt_sigma: float = setting(0.8, text=_SIGMA.format("prompt"), at_least=0, at_most=10)
    max_prompt_tokens: int = setting(8192, text=_MAX.format("prompt"), **_MAX_BOUNDS)
    mean_output_tokens: float = setting(128.0, text=_MEAN.format("output"), **_MEAN_BOUNDS)
    output_sigma: float = setting(0.8, text=_SIGMA.format("output"), at_least=0, at_most=10)
    max_output_tokens: int = setting(2048, text=_MAX.format("output"), **_MAX_BOUNDS)
    tenants: tuple[TenantShare, ...] = ()
    seed: int = setting(0, text="seed of the random numbers", at_least=0)

    def __post_init__(self) -> None:
        check(self)
        check_unique("tenants", (tenant.name for tenant in self.tenants))
        if self.rate_per_s * self.duration_s > MAX_REQUESTS:
            raise ValueError(f"rate_per_s x duration_s must be at most {MAX_REQUESTS:g}")
        least_s = self.duration_s / MAX_REQUESTS
        if self.arrivals is ArrivalProcess.MMPP and self.mean_state_s < least_s:
            raise SettingError(
                f"{{}} must be at least {least_s:g}, not {self.mean_state_s}", "mean_state_s"
            )


def synthetic_trace(config: SyntheticConfig) -> Iterator[TraceRequest]:
    """Yield the requests that arrive before `duration_s`, in order of arrival."""
    random = np.random.default_rng(config.seed)
    choose = TenantChoice(config.tenants, random)
    for arrival_s in _arrivals(config, random):
        if arrival_s >= config.duration_s:
            return
        yield TraceRequest(
            arrival_s=arrival_s,
            num_prompt_tokens=_length(
                random, config.mean_prompt_tokens, config.prompt_sigma, config.max_prompt_tokens
            ),
            num_output_tokens=_length(
                random, config.mean_output_tokens, config.output_sigma, config.max_output_tokens
            ),
            tenant=choose(),
        )


class TenantChoice:
    """Draws tenant names at random, weighted by their shares."""

    def __init__(self, tenants: tuple[TenantShare, ...], random: np.random.Generator) -> None:
        self._names = [tenant.name for tenant in tenants]
        total = math.fsum(tenant.share for tenant in tenants)
        self._bounds = np.cumsum([tenant.share / total for tenant in tenants])
        self._random = random

    def __call__(self) -> str:
        """Return the next tenant, drawn at random; "" without tenants."""
        if not self._names:
            return ""
        index = int(np.searchsorted(self._bounds, self._random.random(), side="right"))
        return self._names[min(index, len(self._names) - 1)]


def _arrivals(config: SyntheticConfig, random: np.random.Generator) -> Iterator[float]:
    match config.arrivals:
        case ArrivalProcess.POISSON:
            return _renewals(config.rate_per_s, 1.0, random)
        case ArrivalProcess.GAMMA:
            return _renewals(config.rate_per_s, config.burstiness, random)
        case ArrivalProcess.MMPP:
            return _switching(config, random)


def _renewals(rate_per_s: float, variation: float, random: np.random.Generator) -> Iterator[float]:
    shape = 1.0 / variation**2
    now_s = 0.0
    while True:
        now_s += float(random.gamma(shape, 1.0 / (shape * rate_per_s)))
        yield now_s


def _switching(config: SyntheticConfig, random: np.random.Generator) -> Iterator[float]:
    # Both states have the same mean duration, so the mean of the rates is the configured one.
    calm_per_s = 2.0 * config.rate_per_s / (1.0 + config.burstiness)
    rates = (calm_per_s, calm_per_s * config.burstiness)
    state = int(random.integers(2))
    now_s, until_s = 0.0, float(random.exponential(config.mean_state_s))
    while True:
        next_s = now_s + float(random.exponential(1.0 / rates[state]))
        if next_s < until_s:
            now_s = next_s
            yield now_s
        else:
            # Exponential gaps are memoryless, so the rest of this gap is drawn again.
            now_s, state = until_s, 1 - state
            until_s += float(random.exponential(config.mean_state_s))


def _length(random: np.random.Generator, mean: float, sigma: float, most: int) -> int:
    drawn = float(random.lognormal(math.log(mean) - sigma**2 / 2.0, sigma))
    return min(max(round(drawn), 1), most)
