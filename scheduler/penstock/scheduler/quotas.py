"""Limits the live requests, the requests per minute and the tokens per minute of each tenant.

Contains the limits of a tenant, the description of an exceeded limit, the accounts of use, and the
check of a new request. They read no clock: `now` is an argument. There is one account per tenant,
so a limit applies over all fronts (gRPC server processes).

The two limits per minute are the Generic Cell Rate Algorithm in its virtual scheduling form (ITU-T
Recommendation I.371): an account is the time at which the tenant's allowance for a minute is full
again. Each use moves that time forward in proportion to the limit, and a request fits if the time
is then at most a minute ahead. So an idle tenant may use a minute's allowance in a burst and then
continue at the configured rate: in any interval of w seconds it gets at most (1 + w / 60) times its
limit.

The output length is not known in advance: output is charged as it is generated and may put the
account more than a minute ahead. The tenant's next request is admitted only after that excess has
elapsed. A prompt larger than a minute's allowance fits if the allowance is unused.

A request that is displaced from the queue is refunded, at most up to the full allowance. The bound
above is on charges less refunds.
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
"""Largest limit: up to this value sums of tokens are exact in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """The limits of one tenant, over all fronts together; None for no limit.

    A request of n outputs counts as n requests: each takes a slot and is generated separately.
    `max_num_live`: requests that wait or run. `max_requests_per_minute`: requests that join the
    queue. `max_tokens_per_minute`: tokens of prompts, charged when the request joins the queue, and
    of outputs, charged as they are generated.

    Raises SettingError naming the field, if a limit is not in 1..MAX_QUOTA.
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
    """The kinds of limit: live requests, waiting requests, requests per minute, tokens per
    minute.
    """

    NUM_LIVE = 1
    """`TenantQuota.max_num_live`."""
    REQUESTS_PER_MINUTE = 2
    TOKENS_PER_MINUTE = 3
    NUM_WAITING = 4
    """`SchedulerConfig.max_num_waiting_per_tenant`: waiting requests of one tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaBreach:
    """The limit that a rejected request exceeds.

    `retry_after_s`: seconds after which the request fits if the tenant sends no other request; a
    prediction for NUM_WAITING; infinite if the request never fits; None if unknown, because other
    requests of the tenant must end first.
    """

    kind: QuotaKind
    limit: int
    retry_after_s: float | None = None


_MINUTE_S = 60.0
_ROUNDING_S = 1e-6
"""Tolerance, so that a retry after exactly the returned delay does not fail by rounding."""
_FIRST_CAPACITY = 16
_MAX_SWEPT = 2
"""Number of idle accounts checked for each new account, so that accounts are dropped faster than
added.
"""


def minute_breach(
    quota: TenantQuota, num_requests: int, num_tokens: int, full_s: tuple[float, float], now: float
) -> QuotaBreach | None:
    """Return the exceeded limit per minute; if both are exceeded, the limit with the longer wait;
    None if no limit is exceeded.

    `num_requests`, `num_tokens`: what the new request would use. `full_s`: the times at which the
    tenant's allowances of requests and of tokens are full again.
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
    """Return when an allowance of `limit` per minute is full again after a use of `count`;
    `full_s`: when it is full without that use.
    """
    return max(full_s, now) + count * (_MINUTE_S / limit)


class QuotaAccounts:
    """Per-tenant quota accounts, kept while a tenant has live requests or an allowance that is not
    full.

    Limits may be replaced at any time. Usage is stored as the time at which the allowance is full
    again, so that a lowered limit does not block a tenant for hours.
    """

    def __init__(self, quotas: Mapping[str, TenantQuota], default: TenantQuota) -> None:
        self._quotas: Mapping[str, TenantQuota] = dict(quotas)
        self._default = default
        self._row_of: dict[str, int] = {}
        self._name_of: list[str] = []
        self._free: list[int] = []
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._num_live: list[int] = []
        self._requests_full_s: list[float] = []
        self._tokens_full_s: NDArray[np.float64] = np.zeros(_FIRST_CAPACITY)
        # Seconds that one token costs, 0 without a limit.
        self._token_s: NDArray[np.float64] = np.zeros(_FIRST_CAPACITY)
        self._is_counting = False
        # By tenant index, for tenants with live requests.
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
        """Return the quota that a request exceeds; None if it fits.

        `num_tokens`: length of the prompt. If several quotas are exceeded, return the limit per
        minute with the longest wait; the limit of live requests only if no limit per minute is
        exceeded.
        """
        quota = self.quota_of(tenant)
        if quota == NO_QUOTA:
            return None
        limit = quota.max_num_live
        row = self._row_of.get(tenant)
        num_live = 0 if row is None else self._num_live[row]
        over_live: QuotaBreach | None = None
        if limit is not None and num_live + num_outputs > limit:
            over_live = QuotaBreach(kind=QuotaKind.NUM_LIVE, limit=limit)
        if row is None:
            return over_live
        full_s = self._requests_full_s[row], float(self._tokens_full_s[row])
        return minute_breach(quota, num_outputs, num_tokens, full_s, now) or over_live

    def charge_request(self, spec: RequestSpec, num_outputs: int, index: int, now: float) -> None:
        """Charge a request that joins the queue, with `num_outputs` outputs; `spec`: its first
        output.

        `index`: the tenant's index in `TenantCounters`. The prompt is charged once. Every output
        counts as a live request and as one of the minute's requests. A replayed request was charged
        when it first joined, so it counts only as live.
        """
        tenant = spec.tenant
        row = self._row_of.get(tenant)
        if row is None:
            row = self._add(tenant, now)
        self._idle.pop(tenant, None)
        self._num_live[row] += num_outputs
        if index >= len(self._row_at):
            grown = np.zeros(2 * index, dtype=np.intp)
            grown[: len(self._row_at)] = self._row_at
            self._row_at = grown
        self._row_at[index] = row
        if spec.num_replays:
            return
        limit = self.quota_of(tenant).max_requests_per_minute
        if limit is not None:
            self._requests_full_s[row] = charged(
                self._requests_full_s[row], num_outputs, limit, now
            )
        if self._token_s[row]:
            full_s = max(float(self._tokens_full_s[row]), now)
            self._tokens_full_s[row] = full_s + spec.num_prompt_tokens * float(self._token_s[row])

    def refund(self, spec: RequestSpec) -> None:
        """Refund one output of a live request of which nothing was computed.

        Call it for every output; the call for the first output also refunds the prompt.
        """
        row = self._row_of[spec.tenant]
        limit = self.quota_of(spec.tenant).max_requests_per_minute
        # A time in the past means a full allowance, just like `now`.
        if limit is not None:
            self._requests_full_s[row] -= _MINUTE_S / limit
        if not spec.leader_key:
            self._tokens_full_s[row] -= spec.num_prompt_tokens * float(self._token_s[row])

    def release(self, tenant: str) -> None:
        """Record that one output of a live request has ended."""
        row = self._row_of[tenant]
        self._num_live[row] -= 1
        if not self._num_live[row]:
            self._idle[tenant] = None

    def charge_outputs(self, indices: NDArray[np.int32], now: float) -> None:
        """Charge one generated token to each tenant in `indices` int32 [m] (tenant indices; may
        repeat). A no-op while no tenant has a limit of tokens.
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
            or (name in self._idle) is not (self._num_live[row] == 0)
        ]
        if any(name not in self._row_of for name in num_live):
            found.append("a tenant with live requests has no quota account")
        if not np.isfinite(self._tokens_full_s).all():
            found.append("a quota account is NaN")
        return found

    def _token_price_s(self, tenant: str) -> float:
        limit = self.quota_of(tenant).max_tokens_per_minute
        return 0.0 if limit is None else _MINUTE_S / limit

    def _add(self, tenant: str, now: float) -> int:
        self._drop_idle(now)
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

    def _drop_idle(self, now: float) -> None:
        """Drop up to `_MAX_SWEPT` accounts of tenants without live requests whose allowances are
        full.
        """
        for _ in range(min(_MAX_SWEPT, len(self._idle))):
            name, _ = self._idle.popitem(last=False)
            row = self._row_of[name]
            if max(self._requests_full_s[row], float(self._tokens_full_s[row])) > now:
                self._idle[name] = None
                continue
            del self._row_of[name]
            self._token_s[row] = 0.0
            self._free.append(row)
