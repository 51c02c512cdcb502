"""Quotas of a tenant: live requests, requests per minute, tokens per minute, and their use.

Owns the limits as one validated value, the value that names an exceeded limit, the accounts, and
the check whether one more request fits. Pure: `now` is an argument. Does not know the source of the
limits, nor fronts: there is one account per tenant, so a limit applies over all fronts.

The two limits per minute are the Generic Cell Rate Algorithm in its virtual scheduling form (ITU-T
Recommendation I.371): an account is the time at which the tenant has its full minute's allowance
again. Use advances that time by its share of a minute, and a request fits if the time is then at
most a minute ahead. So a quiet tenant may use a minute's allowance at once and then continues at
the rate: in any interval of w seconds it gets at most (1 + w / 60) times its limit.

Output length is not known beforehand: output is charged as it is generated and may put the account
more than a minute ahead. The tenant must wait until this debt has elapsed before its next request
is admitted. A prompt larger than a minute's allowance fits if the allowance is unused.
"""

import enum
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.request import RequestSpec
from penstock.scheduler.setting import check, setting

MAX_QUOTA = 10**12
"""Largest limit: up to here sums of tokens are exact in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """The limits of one tenant, over all fronts together; None for no limit.

    A request of n outputs counts as n requests: each takes a slot and is generated separately.
    `max_num_live`: requests that wait or run. `max_requests_per_minute`: admitted requests.
    `max_tokens_per_minute`: tokens of prompts, charged at admission, and of outputs, charged as
    they are generated.

    Raises SettingError, which names the field, for a limit that is not in 1..MAX_QUOTA.
    """

    max_num_live: int | None = setting(
        None,
        "tenants",
        "waiting and running requests of each tenant",
        name="tenant_max_live",
        at_least=1,
        at_most=MAX_QUOTA,
        shown="no limit",
    )
    max_requests_per_minute: int | None = setting(
        None,
        "tenants",
        "admitted requests of each tenant per minute",
        name="tenant_requests_per_minute",
        at_least=1,
        at_most=MAX_QUOTA,
        shown="no limit",
    )
    max_tokens_per_minute: int | None = setting(
        None,
        "tenants",
        "tokens of each tenant's prompts and outputs per minute",
        name="tenant_tokens_per_minute",
        at_least=1,
        at_most=MAX_QUOTA,
        shown="no limit",
    )

    def __post_init__(self) -> None:
        check(self)


NO_QUOTA = TenantQuota()
"""No limits."""


class QuotaKind(enum.IntEnum):
    """The kinds of limits of a tenant."""

    NUM_LIVE = 1
    """`TenantQuota.max_num_live`."""
    REQUESTS_PER_MINUTE = 2
    TOKENS_PER_MINUTE = 3
    NUM_WAITING = 4
    """`SchedulerConfig.max_num_waiting_per_tenant`: one tenant's part of the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaBreach:
    """Why a tenant's request is not admitted: the exceeded limit.

    `retry_after_s`: delay after which the request would be admitted if the tenant sends nothing
    else, None if that depends on the end of its other requests.
    """

    kind: QuotaKind
    limit: int
    retry_after_s: float | None = None


_MINUTE_S = 60.0
_ROUNDING_S = 1e-6
"""Tolerance, so that a retry after exactly the returned delay does not fail by rounding."""
_FIRST_CAPACITY = 16
_MAX_SWEPT = 2
"""Idle accounts checked for each new one, so that accounts are dropped faster than added."""


def minute_breach(
    quota: TenantQuota, num_requests: int, num_tokens: int, full_s: tuple[float, float], now: float
) -> QuotaBreach | None:
    """Return the exceeded limit per minute, of several the one with the longest wait; None if none
    is.

    `full_s`: the tenant's accounts of requests and of tokens.
    """
    worst: QuotaBreach | None = None
    for kind, limit, count, account_s in (
        (QuotaKind.REQUESTS_PER_MINUTE, quota.max_requests_per_minute, num_requests, full_s[0]),
        (QuotaKind.TOKENS_PER_MINUTE, quota.max_tokens_per_minute, num_tokens, full_s[1]),
    ):
        if limit is None:
            continue
        # A request of more than a minute's allowance needs the full allowance.
        wait_s = charged(account_s, min(count, limit), limit, now) - _MINUTE_S - now
        if wait_s > _ROUNDING_S and (worst is None or wait_s > (worst.retry_after_s or 0.0)):
            worst = QuotaBreach(kind=kind, limit=limit, retry_after_s=wait_s)
    return worst


def charged(full_s: float, count: int, limit: int, now: float) -> float:
    """Return an account of `limit` per minute after a use of `count`."""
    return max(full_s, now) + count * (_MINUTE_S / limit)


class QuotaAccounts:
    """Accounts by tenant, kept while a tenant has live requests or a debt.

    Limits may be replaced at any time. The used part of a minute is kept in seconds of waiting, so
    that a smaller limit does not become a debt of hours.
    """

    def __init__(self, quotas: Mapping[str, TenantQuota], default: TenantQuota) -> None:
        self._quotas: Mapping[str, TenantQuota] = dict(quotas)
        self._default = default
        self._row_of: dict[str, int] = {}
        self._name_of: list[str] = []
        self._free: list[int] = []
        self._resting: OrderedDict[str, None] = OrderedDict()
        self._num_live: list[int] = []
        self._requests_full_s: list[float] = []
        self._tokens_full_s: NDArray[np.float64] = np.zeros(_FIRST_CAPACITY)
        # Seconds that one token costs, 0 without a limit.
        self._token_s: NDArray[np.float64] = np.zeros(_FIRST_CAPACITY)
        self._is_counting = False
        # By the index in the table of tenants, of tenants with live requests.
        self._row_at: NDArray[np.intp] = np.zeros(_FIRST_CAPACITY, dtype=np.intp)

    def __len__(self) -> int:
        return len(self._row_of)

    def set_quotas(self, quotas: Mapping[str, TenantQuota], default: TenantQuota) -> None:
        """Replace all limits; `default` applies to tenants that `quotas` does not name."""
        self._quotas, self._default = dict(quotas), default
        for name, row in self._row_of.items():
            self._token_s[row] = self._token_price_s(name)
        self._is_counting = bool(np.count_nonzero(self._token_s))

    def quota_of(self, tenant: str) -> TenantQuota:
        """Return the limits of a tenant."""
        return self._quotas.get(tenant, self._default)

    def breach_of(
        self, tenant: str, num_tokens: int, num_outputs: int, now: float
    ) -> QuotaBreach | None:
        """Return the quota that a request of `num_outputs` outputs, with a prompt of `num_tokens`,
        exceeds.

        Of several, the one with the longest wait; None if it fits.
        """
        quota = self.quota_of(tenant)
        if quota == NO_QUOTA:
            return None
        most = quota.max_num_live
        row = self._row_of.get(tenant)
        num_live = 0 if row is None else self._num_live[row]
        over_live: QuotaBreach | None = None
        if most is not None and num_live + num_outputs > most:
            over_live = QuotaBreach(kind=QuotaKind.NUM_LIVE, limit=most)
        if row is None:
            return over_live
        full_s = self._requests_full_s[row], float(self._tokens_full_s[row])
        return minute_breach(quota, num_outputs, num_tokens, full_s, now) or over_live

    def take_in(self, spec: RequestSpec, num_outputs: int, index: int, now: float) -> None:
        """Charge an admitted request, with the leader `spec`.

        `index`: index of its tenant in the table of tenants. The prompt is computed once and
        charged once; every output counts as live and as a request of the minute. A replay was
        charged when it was first admitted: now only its outputs count as live.
        """
        tenant = spec.tenant
        row = self._row_of.get(tenant)
        if row is None:
            row = self._add(tenant, now)
        self._resting.pop(tenant, None)
        self._num_live[row] += num_outputs
        if index >= len(self._row_at):
            grown = np.zeros(2 * index, dtype=np.intp)
            grown[: len(self._row_at)] = self._row_at
            self._row_at = grown
        self._row_at[index] = row
        if spec.num_replays:
            return
        most = self.quota_of(tenant).max_requests_per_minute
        if most is not None:
            self._requests_full_s[row] = charged(self._requests_full_s[row], num_outputs, most, now)
        if self._token_s[row]:
            full_s = max(float(self._tokens_full_s[row]), now)
            self._tokens_full_s[row] = full_s + spec.num_prompt_tokens * float(self._token_s[row])

    def release(self, tenant: str) -> None:
        """Record that one output of an admitted request has ended."""
        row = self._row_of[tenant]
        self._num_live[row] -= 1
        if not self._num_live[row]:
            self._resting[tenant] = None

    def charge_outputs(self, indices: NDArray[np.int32], now: float) -> None:
        """Charge one generated token for each entry of `indices` int32 [m]: tenants as in
        `take_in`.
        """
        if not self._is_counting:
            return
        count = len(self._name_of)
        made = np.bincount(self._row_at[indices], minlength=count)
        full_s = self._tokens_full_s[:count]
        np.maximum(full_s, now, out=full_s)
        full_s += made * self._token_s[:count]

    def faults(self, num_live: Mapping[str, int]) -> list[str]:
        """Return the inconsistencies of the accounts, given how many outputs of each tenant are
        live.
        """
        found = [
            f"the quota account of tenant {name!r} is miscounted"
            for name, row in self._row_of.items()
            if self._num_live[row] != num_live.get(name, 0)
            or (name in self._resting) is not (self._num_live[row] == 0)
        ]
        if any(name not in self._row_of for name in num_live):
            found.append("a tenant with live requests has no quota account")
        if not np.isfinite(self._tokens_full_s).all():
            found.append("a quota account is not a number")
        return found

    def _token_price_s(self, tenant: str) -> float:
        most = self.quota_of(tenant).max_tokens_per_minute
        return 0.0 if most is None else _MINUTE_S / most

    def _add(self, tenant: str, now: float) -> int:
        self._forget_some(now)
        row = self._free.pop() if self._free else len(self._name_of)
        if row == len(self._name_of):
            self._name_of.append(tenant)
            self._num_live.append(0)
            self._requests_full_s.append(0.0)
            if row == len(self._token_s):
                self._tokens_full_s = np.concatenate((self._tokens_full_s, np.zeros(row)))
                self._token_s = np.concatenate((self._token_s, np.zeros(row)))
        self._row_of[tenant] = row
        self._name_of[row] = tenant
        self._requests_full_s[row] = self._tokens_full_s[row] = now
        self._token_s[row] = self._token_price_s(tenant)
        self._is_counting = self._is_counting or bool(self._token_s[row])
        return row

    def _forget_some(self, now: float) -> None:
        """Drop accounts without live requests or debt."""
        for _ in range(min(_MAX_SWEPT, len(self._resting))):
            name, _ = self._resting.popitem(last=False)
            row = self._row_of[name]
            if max(self._requests_full_s[row], float(self._tokens_full_s[row])) > now:
                self._resting[name] = None
                continue
            del self._row_of[name]
            self._token_s[row] = 0.0
            self._free.append(row)
