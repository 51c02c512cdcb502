"""Learns the distribution of output lengths from ended requests.

Contains the mean, used to predict when running requests end; the distribution by tenant and limit,
used to predict whether a deadline is met; and the selection of requests that are admitted only to
learn output lengths (`Exploration`).
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_NUM_EXACT = 16
_PER_OCTAVE = 8
_NUM_BUCKETS = _NUM_EXACT + 18 * _PER_OCTAVE
"""Buckets for lengths up to 4 million tokens, 6 to 12 % each; the last has all longer ones."""
_BACK_OFF_REQUESTS = 8.0
"""With this many outputs, a group has the same weight as the more general group."""
_MIN_SEEN = 16
"""There is no distribution before this many outputs have ended."""
_MAX_HAZARD = 1.0 - 1e-9
_RENEW_AFTER = 8
"""A distribution is recomputed after this many more outputs."""
_MAX_GROUPS = 1024
_MAX_WEIGHT = 1e12

_Group = tuple[str | None, int | None]


def _bucket_of(num_tokens: int) -> int:
    if num_tokens < _NUM_EXACT:
        return max(num_tokens, 0)
    shift = num_tokens.bit_length() - 4
    return min(_NUM_EXACT + (shift - 2) * _PER_OCTAVE + (num_tokens >> shift), _NUM_BUCKETS - 1)


_FIRST: list[int] = [
    *range(_NUM_EXACT),
    *((_PER_OCTAVE + step) << shift for shift in range(1, 19) for step in range(_PER_OCTAVE)),
]
"""The shortest length of each bucket, and the end of the last one."""
_FIRST.append(2 * _FIRST[-_PER_OCTAVE])
_BOUNDS = np.array(_FIRST, dtype=np.float64)
_WIDTHS = np.diff(_BOUNDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputBounds:
    """Bounds of one output's length, in tokens. `num_known`: tokens generated so far."""

    max_tokens: int
    min_tokens: int = 0
    num_known: int = 0

    @property
    def least(self) -> int:
        """The minimum length of the output, in tokens."""
        return min(max(self.min_tokens, self.num_known + 1), self.max_tokens)


class LengthDistribution:
    """Distribution of output lengths, evaluated within the bounds of one output.

    `log_survival`: for each bucket, the logarithm of the probability that an output reaches it;
    interpolated inside a bucket.
    """

    __slots__ = ("_log_survival",)

    def __init__(self, log_survival: list[float]) -> None:
        self._log_survival = log_survival

    def chance_within(self, num_tokens: int, bounds: OutputBounds) -> float:
        """Return the probability that the output has at most `num_tokens` tokens in total.

        Always 0 below `bounds.least`, and 1 from `bounds.max_tokens` on.
        """
        if num_tokens >= bounds.max_tokens:
            return 1.0
        if num_tokens < bounds.least:
            return 0.0
        reached = self._log_survival_of(bounds.least)
        return -math.expm1(min(self._log_survival_of(num_tokens + 1) - reached, 0.0))

    def tokens_with(self, chance: float, bounds: OutputBounds) -> int:
        """Return the smallest number n, within the bounds, such that the output has at most n
        tokens in total with a probability of at least `chance`.
        """
        if chance <= 0.0:
            return bounds.least
        if chance >= 1.0:
            return bounds.max_tokens
        target = self._log_survival_of(bounds.least) + math.log1p(-chance)
        # The values are descending, but searchsorted needs ascending ones.
        index = bisect_left(self._log_survival, -target, key=lambda value: -value)
        if index >= len(self._log_survival):
            return bounds.max_tokens
        index = max(index - 1, 0)
        before, after = self._log_survival[index : index + 2]
        part = (target - before) / (after - before) if after < before else 1.0
        num_tokens = _FIRST[index] + math.ceil(part * (_FIRST[index + 1] - _FIRST[index])) - 1
        return min(max(num_tokens, bounds.least), bounds.max_tokens)

    def _log_survival_of(self, num_tokens: int) -> float:
        """Return the logarithm of the probability that an output has at least `num_tokens`
        tokens.
        """
        index = _bucket_of(num_tokens)
        before, after = self._log_survival[index : index + 2]
        part = (num_tokens - _FIRST[index]) / (_FIRST[index + 1] - _FIRST[index])
        return before + min(part, 1.0) * (after - before)


UNENDING = LengthDistribution([0.0] * (_NUM_BUCKETS + 1))
"""The distribution of an output that only its limit can end: it always has the maximum length."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningOutputs:
    """The current lengths of the running outputs, `num_tokens` int32 [n].

    `is_of_tenant`, `has_limit` bool [n]: which of them belong to the tenant of the requested
    distribution, and which have a limit in the same octave as that distribution's.
    """

    num_tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    is_of_tenant: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    has_limit: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    def in_group(self, group: "_Group") -> NDArray[np.int32]:
        """Return the lengths of the outputs that belong to a group (see `_groups_of`)."""
        chosen = np.ones(len(self.num_tokens), dtype=np.bool_)
        if group[0] is not None:
            chosen &= self.is_of_tenant
        if group[1] is not None:
            chosen &= self.has_limit
        return self.num_tokens[chosen]


class _Histogram:
    """Decayed counts of complete and of truncated outputs, by length.

    Decay is implemented by a growing weight of new outputs, so that old counts need no update.
    """

    __slots__ = ("_cuts", "_ends", "_growth", "_weight", "num_seen")

    def __init__(self, memory: int) -> None:
        self._ends: NDArray[np.float64] = np.zeros(_NUM_BUCKETS)
        self._cuts: NDArray[np.float64] = np.zeros(_NUM_BUCKETS)
        self.num_seen = 0
        self._weight = 1.0
        self._growth = 1.0 / (1.0 - 1.0 / memory) if memory > 1 else 2.0

    def observe(self, num_tokens: int, *, is_cut: bool) -> None:
        """Record an output of this length; `is_cut`: it was truncated instead of ending at a stop
        token.
        """
        self.num_seen += 1
        counts = self._cuts if is_cut else self._ends
        counts[_bucket_of(num_tokens)] += self._weight
        self._weight *= self._growth
        if self._weight > _MAX_WEIGHT:
            self._ends /= self._weight
            self._cuts /= self._weight
            self._weight = 1.0

    def at_risk(
        self, running: NDArray[np.int32]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return for each bucket the number of outputs that could end there, and the number of
        outputs that ended there.

        Outputs truncated within a bucket count as half (the actuarial estimate). `running`: lengths
        so far of running outputs; these count as truncated.
        """
        ends, cuts = self._ends / self._weight, self._cuts / self._weight
        if len(running):
            buckets = np.searchsorted(_BOUNDS, running, side="right") - 1
            cuts += np.bincount(np.minimum(buckets, _NUM_BUCKETS - 1), minlength=_NUM_BUCKETS)
        later = np.cumsum((ends + cuts)[::-1])[::-1]
        return later - 0.5 * cuts, ends


class OutputLengths:
    """Estimates how many tokens a request generates until a stop token ends it.

    An output that reached its limit or a deadline was truncated. It gives a lower bound of the
    length, and is treated as a censored sample. Ignoring such outputs would bias the estimates,
    since long outputs are truncated most often.

    - `mean_tokens`, `expected`, `expected_remaining`: outputs are assumed memoryless. The mean is
      the number of all tokens divided by the number of complete outputs (the maximum likelihood for
      censored lifetimes: Cox and Oakes, *Analysis of Survival Data*, chapter 3).
    - `distribution`: the hazards by length (Kaplan and Meier, "Nonparametric Estimation from
      Incomplete Observations", 1958), of the tenant's outputs with a limit of the same octave. Each
      hazard is shrunk towards the hazard of a more general group, in the order: tenant and limit,
      tenant, limit, all. So at a length without observations in a group, the hazard of the more
      general group applies.

    Observations from `memory` requests ago have weight 1/e. Raises ValueError naming the invalid
    parameter.
    """

    def __init__(self, prior_tokens: float = 256.0, *, memory: int = 128) -> None:
        if not (math.isfinite(prior_tokens) and prior_tokens >= 1.0):
            raise ValueError(f"prior_tokens must be finite and at least 1, not {prior_tokens}")
        if memory < 1:
            raise ValueError(f"memory must be at least 1, not {memory}")
        # The prior has the weight of one request.
        self._num_tokens = prior_tokens
        self._num_ends = 1.0
        self._keep = 1.0 - 1.0 / memory
        self._memory = memory
        self._prior_tokens = prior_tokens
        self._groups: dict[_Group, _Histogram] = {}
        self._known: dict[_Group, tuple[int, LengthDistribution | None]] = {}
        self._num_seen = 0

    @property
    def mean_tokens(self) -> float:
        """Tokens that a request without a limit would generate on average, at least 1."""
        return max(self._num_tokens / self._num_ends, 1.0)

    def observe(
        self, num_tokens: int, *, is_cut: bool = False, tenant: str = "", max_tokens: int = 0
    ) -> None:
        """Record a request that ended after `num_tokens` output tokens.

        `is_cut` is True if the output was truncated. `max_tokens` is the request's limit of output
        tokens.
        """
        self._num_tokens = self._keep * self._num_tokens + max(num_tokens, 1)
        # Never 0: if no output ends by itself, the mean grows until every limit is below it.
        self._num_ends = max(self._keep * self._num_ends + (not is_cut), 1e-6)
        self._num_seen += 1
        for group in _groups_of(tenant, max_tokens):
            histogram = self._groups.pop(group, None) or _Histogram(self._memory)
            # The most recent one last.
            self._groups[group] = histogram
            histogram.observe(num_tokens, is_cut=is_cut)
        while len(self._groups) > _MAX_GROUPS:
            del self._groups[next(iter(self._groups))]

    def num_seen_of(self, tenant: str) -> int:
        """Return the number of recorded outputs of a tenant, truncated ones included."""
        histogram = self._groups.get((tenant, None))
        return 0 if histogram is None else histogram.num_seen

    def distribution(
        self, tenant: str, max_tokens: int, running: Callable[[], RunningOutputs] = RunningOutputs
    ) -> LengthDistribution | None:
        """Return the distribution of a tenant's outputs with this limit; None while there are too
        few samples.

        `running`: called when the distribution is recomputed. Running outputs are included because
        the recent outputs that have ended are mostly short ones.
        """
        key = (tenant, max_tokens.bit_length())
        num_seen, known = self._known.get(key, (-_RENEW_AFTER, None))
        if self._num_seen - num_seen >= (1 if known is None else _RENEW_AFTER):
            if len(self._known) >= _MAX_GROUPS:
                self._known.clear()
            known = self._computed(tenant, max_tokens, running())
            self._known[key] = (self._num_seen, known)
        return known

    def _computed(
        self, tenant: str, max_tokens: int, running: RunningOutputs
    ) -> LengthDistribution | None:
        if self._num_seen < _MIN_SEEN:
            return None
        # Beyond all observed lengths: memoryless, with a finite mean even if no output ends by
        # itself.
        mean = min(self.mean_tokens, self._prior_tokens)
        hazards, weight = -np.expm1(-_WIDTHS / mean), 1.0
        for group in _groups_of(tenant, max_tokens):
            histogram = self._groups.get(group)
            if histogram is not None:
                at_risk, ends = histogram.at_risk(running.in_group(group))
                hazards = (ends + weight * hazards) / (at_risk + weight)
            weight = _BACK_OFF_REQUESTS
        stays = np.log1p(-np.minimum(hazards, _MAX_HAZARD))
        return LengthDistribution([0.0, *np.cumsum(stays).tolist()])

    def expected(self, max_tokens: float) -> float:
        """Return how many tokens a new request is expected to generate, bounded by its limit."""
        mean = self.mean_tokens
        return -math.expm1(-max_tokens / mean) * mean

    def expected_remaining(self, num_requests: int, num_tokens_to_limit: int) -> float:
        """Return how many tokens all running requests together are still expected to generate.

        Outputs are assumed memoryless, so tokens already generated do not matter.
        `num_tokens_to_limit`: the sum of the tokens up to their limits.
        """
        if not num_requests:
            return 0.0
        return num_requests * self.expected(num_tokens_to_limit / num_requests)


def _groups_of(tenant: str, max_tokens: int) -> tuple[_Group, ...]:
    """Return the groups that an output with this tenant and limit belongs to, the most general
    first. Limits in the same octave (2**k to 2**(k + 1) - 1 tokens) belong to the same group.
    """
    octave = max_tokens.bit_length()
    return ((None, None), (None, octave), (tenant, None), (tenant, octave))


_MIN_SEEN_OF_TENANT = 16
"""A tenant with fewer observed outputs is new."""
_MAX_NEW = 16.0
"""Maximum number of requests of a new tenant that are predicted from their bounds alone; the count
decays over a minute.
"""
_MAX_NEW_OF_ALL = 64.0
_MEMORY_S = 60.0
_EVERY = 64
_MAX_TENANTS = 4096


@dataclass(slots=True)
class _ExplorationAllowance:
    """The exploration allowance of one tenant, or of all tenants together. `num_new`: decayed
    number of requests admitted while their tenant was new, as of time `at_s`. `num_unlikely`: see
    `Exploration.explores_unlikely`.
    """

    num_new: float = 0.0
    at_s: float = -math.inf
    num_unlikely: int = 0

    def allows(self, max_num: float, now: float) -> bool:
        self.num_new *= math.exp(-max(now - self.at_s, 0.0) / _MEMORY_S)
        self.at_s = max(now, self.at_s)
        return self.num_new + 1.0 <= max_num


class Exploration:
    """Selects requests that are admitted in order to learn output lengths.

    These are a limited number of requests of new tenants, per tenant and in total, and a fixed
    share of the requests of each tenant that would be rejected although their chance to complete
    in time is above 0. Only the most recently active tenants are tracked.
    """

    __slots__ = ("_accounts", "_of_all")

    def __init__(self) -> None:
        self._accounts: dict[str, _ExplorationAllowance] = {}
        self._of_all = _ExplorationAllowance()

    def explores_new_tenant(self, tenant: str, num_seen: int, now: float) -> bool:
        """Return whether to predict a request from its bounds alone because its tenant is new; if
        so, count it. `num_seen`: number of observed outputs of that tenant.
        """
        if num_seen >= _MIN_SEEN_OF_TENANT:
            return False
        account = self._account_of(tenant)
        if not account.allows(_MAX_NEW, now) or not self._of_all.allows(_MAX_NEW_OF_ALL, now):
            return False
        account.num_new += 1.0
        self._of_all.num_new += 1.0
        return True

    def explores_unlikely(self, tenant: str) -> bool:
        """Count a request that would be rejected although its chance is above 0; return whether to
        admit it nevertheless: True for one in `_EVERY` such requests of a tenant.
        """
        account = self._account_of(tenant)
        account.num_unlikely += 1
        return account.num_unlikely % _EVERY == 0

    def _account_of(self, tenant: str) -> _ExplorationAllowance:
        account = self._accounts.pop(tenant, None) or _ExplorationAllowance()
        self._accounts[tenant] = account
        if len(self._accounts) > _MAX_TENANTS:
            del self._accounts[next(iter(self._accounts))]
        return account
