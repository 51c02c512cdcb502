"""Generates synthetic traffic: random arrivals, tenants and lengths.

The same settings, including the seed, give the same trace.
"""

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.server.observe.recording.trace import (
    MAX_ARRIVAL_S,
    MAX_REQUEST_TOKENS,
    TraceRequest,
    check_text,
)
from penstock.tools.simulation.trace_formats import check_unique

MAX_REQUESTS = 1e8
"""Upper bound of the mean number of requests of a trace; so many take days to simulate."""
_BURSTINESS = (0.01, 1000.0)
_LEAST_SHARE = 1e-9


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

    name: str
    share: float = 1.0

    def __post_init__(self) -> None:
        check_text("name", self.name)
        if not _LEAST_SHARE <= self.share <= 1.0 / _LEAST_SHARE:
            raise ValueError(
                f"share must be in {_LEAST_SHARE:g} .. {1.0 / _LEAST_SHARE:g}, not {self.share}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticConfig:
    """Settings of a synthetic trace. Raises ValueError, naming the field, if one is invalid.

    Lengths are lognormal and clipped to 1 .. `max_..._tokens`: `mean_..._tokens` is the mean before
    clipping, `..._sigma` the standard deviation of the logarithm (0: always the mean).
    `burstiness`, `mean_state_s`: see ArrivalProcess. `tenants`: empty for requests without a
    tenant.
    """

    rate_per_s: float = 2.0
    duration_s: float = 600.0
    arrivals: ArrivalProcess = ArrivalProcess.POISSON
    burstiness: float = 4.0
    mean_state_s: float = 30.0
    mean_prompt_tokens: float = 512.0
    prompt_sigma: float = 0.8
    max_prompt_tokens: int = 8192
    mean_output_tokens: float = 128.0
    output_sigma: float = 0.8
    max_output_tokens: int = 2048
    tenants: tuple[TenantShare, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "rate_per_s",
            "duration_s",
            "burstiness",
            "mean_state_s",
            "mean_prompt_tokens",
            "mean_output_tokens",
        ):
            value: float = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"{name} must be positive, not {value}")
        for name in ("prompt_sigma", "output_sigma"):
            if not 0.0 <= getattr(self, name) <= 10.0:
                raise ValueError(f"{name} must be in [0, 10], not {getattr(self, name)}")
        for name in ("max_prompt_tokens", "max_output_tokens"):
            if not 1 <= getattr(self, name) <= MAX_REQUEST_TOKENS:
                side = "least 1" if getattr(self, name) < 1 else f"most {MAX_REQUEST_TOKENS}"
                raise ValueError(f"{name} must be at {side}")
        for name in ("mean_prompt_tokens", "mean_output_tokens"):
            if getattr(self, name) > MAX_REQUEST_TOKENS:
                raise ValueError(f"{name} must be at most {MAX_REQUEST_TOKENS}")
        self._check_arrivals()
        check_unique("tenants", (tenant.name for tenant in self.tenants))
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, not {self.seed}")

    def _check_arrivals(self) -> None:
        if self.duration_s > MAX_ARRIVAL_S:
            raise ValueError(f"duration_s must be at most {MAX_ARRIVAL_S:g}")
        if self.rate_per_s * self.duration_s > MAX_REQUESTS:
            raise ValueError(f"rate_per_s x duration_s must be at most {MAX_REQUESTS:g}")
        if self.arrivals is ArrivalProcess.POISSON:
            return
        if not _BURSTINESS[0] <= self.burstiness <= _BURSTINESS[1]:
            least, most = _BURSTINESS
            raise ValueError(f"burstiness must be in {least:g} .. {most:g}, not {self.burstiness}")
        least_s = self.duration_s / MAX_REQUESTS
        if self.arrivals is ArrivalProcess.MMPP and self.mean_state_s < least_s:
            raise ValueError(f"mean_state_s must be at least {least_s:g}, not {self.mean_state_s}")


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
