"""Defines length distributions of prompts and outputs, in tokens: fixed, uniform or lognormal.

The module `options` checks the lengths against the model's limits.
"""

import math
import random
from typing import TypeAlias

import msgspec

from penstock.server.observe.recording.trace import MAX_REQUEST_TOKENS

_MAX_SIGMA = 10.0


class FixedLength(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A fixed length of `num_tokens`."""

    num_tokens: int

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, if one is out of range."""
        _check_tokens("num_tokens", self.num_tokens)

    @property
    def max_tokens(self) -> int:
        """The largest length that can be drawn."""
        return self.num_tokens

    def draw(self, rng: random.Random) -> int:  # noqa: ARG002
        """Return the next length."""
        return self.num_tokens


class UniformLength(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Uniform distribution from `min_tokens` to `max_tokens`, inclusive."""

    min_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, if one is out of range."""
        _check_tokens("min_tokens", self.min_tokens)
        _check_tokens("max_tokens", self.max_tokens)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens, not {self.min_tokens} > {self.max_tokens}"
            )

    def draw(self, rng: random.Random) -> int:
        """Return the next length."""
        return rng.randint(self.min_tokens, self.max_tokens)


class LogNormalLength(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Lognormal distribution, rounded and clipped to 1 .. `max_tokens`.

    `sigma` is the standard deviation of the logarithm, 0 to 10. `mean_tokens` is the mean before
    clipping.
    """

    mean_tokens: float
    sigma: float
    max_tokens: int

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, if one is out of range."""
        _check_tokens("max_tokens", self.max_tokens)
        if not 1.0 <= self.mean_tokens <= self.max_tokens:
            raise ValueError(f"mean_tokens must be in 1 .. max_tokens, not {self.mean_tokens:g}")
        if not 0.0 <= self.sigma <= _MAX_SIGMA:
            raise ValueError(f"sigma must be in 0 .. {_MAX_SIGMA:g}, not {self.sigma:g}")

    def draw(self, rng: random.Random) -> int:
        """Return the next length."""
        location = math.log(self.mean_tokens) - self.sigma**2 / 2.0
        drawn = rng.lognormvariate(location, self.sigma)
        return max(1, round(min(drawn, self.max_tokens)))


Lengths: TypeAlias = FixedLength | UniformLength | LogNormalLength


def parse_lengths(text: str) -> Lengths:
    """Parse `N`, `uniform:MIN:MAX` or `lognormal:MEAN:SIGMA:MAX`. Raises ValueError for another
    form or a value out of range.
    """
    kind, *parts = text.split(":")
    try:
        match kind, parts:
            case "uniform", [least, most]:
                return UniformLength(min_tokens=int(least), max_tokens=int(most))
            case "lognormal", [mean, sigma, most]:
                return LogNormalLength(
                    mean_tokens=float(mean), sigma=float(sigma), max_tokens=int(most)
                )
            case number, []:
                return FixedLength(num_tokens=int(number))
            case _:
                pass
    except ValueError as error:
        if "_tokens must" in str(error) or "sigma must" in str(error):
            raise
    raise ValueError(f"must be N, uniform:MIN:MAX or lognormal:MEAN:SIGMA:MAX, not {text!r}")


def lengths_text(lengths: Lengths) -> str:
    """Format a distribution as `parse_lengths` reads it."""
    match lengths:
        case FixedLength():
            return str(lengths.num_tokens)
        case UniformLength():
            return f"uniform:{lengths.min_tokens}:{lengths.max_tokens}"
        case LogNormalLength():
            return f"lognormal:{lengths.mean_tokens:g}:{lengths.sigma:g}:{lengths.max_tokens}"


def _check_tokens(name: str, value: int) -> None:
    if not 1 <= value <= MAX_REQUEST_TOKENS:
        raise ValueError(f"{name} must be in 1 .. {MAX_REQUEST_TOKENS}, not {value}")
