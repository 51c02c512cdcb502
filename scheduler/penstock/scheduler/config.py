"""The scheduler's settings: frozen, validated once."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.quotas import NO_QUOTA, TenantQuota
from penstock.scheduler.request_options import DEFAULT_RETENTION_PRIORITY

_COUNTS = (
    "max_num_batched_tokens",
    "max_num_waiting",
    "max_num_waiting_tokens",
    "max_num_waiting_per_tenant",
    "max_num_running_per_tenant",
    "aging_stride",
    "max_session_tokens",
)
_NOT_NEGATIVE = (
    "prompt_token_weight",
    "output_token_weight",
    "max_lookahead",
    "max_num_overtakes",
    "max_overtake_s",
    "tenant_burst_tokens",
)


MAX_WEIGHT = 1e6
"""Of a tenant, and one over it: service is counted in floats."""


class AdmissionPolicy(enum.Enum):
    """When a waiting request may take a slot; the names are TensorRT-LLM's.

    GUARANTEED_NO_EVICT reserves blocks up to `max_tokens`: who is in stays in.
    MAX_UTILIZATION takes what is needed now above a watermark: more run at once, and when blocks
    run out somebody is preempted and recomputed later.
    """

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"


class SchedulingOrder(enum.Enum):
    """Who goes next.

    FAIR: priority classes, tenants inside a class by weighted service, earliest deadline inside a
    tenant; small requests may pass a huge one for a while (see fair_order.py, admissions.py).
    FCFS: priority classes, then arrival, and nobody passes: the order that others have.
    """

    FAIR = "fair"
    FCFS = "fcfs"


class EvictionPolicy(enum.Enum):
    """Which cached block makes room for a new one, among those of which nobody asked anything.

    HIT_DENSITY: the one that is likely to bring the fewest hits for the time it stays, learnt from
    the traffic (see hit_density_order.py). LRU: the one used longest ago.
    """

    HIT_DENSITY = "hit_density"
    LRU = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy. Raises ValueError naming the field that is off.

    `max_num_batched_tokens`: the token budget of one step. `watermark`: share of all blocks kept
    free at admission under MAX_UTILIZATION. `max_num_waiting` and `max_num_waiting_tokens`
    (prompt tokens) bound the queue, `max_num_waiting_per_tenant` one tenant's part of it, None for
    no bound. `tenant_quota`: what each tenant may use that was given no quota of its own.

    `foresees_deadlines`: refuse at once, and drop from the queue, whom the fitted prices of a step
    say to miss their deadline; without it a deadline counts when it passes. `min_deadline_chance`:
    the smallest probability, by the lengths of earlier outputs, that a whole answer meets its
    deadline; a request with less is refused, dropped or given up (see completion.py); 0 judges by
    `min_tokens` alone. `target_itl_s`: the
    time between two tokens of a running request that prefill must leave them, None for no target
    (see pacing.py). `known_prices`: what a step of this machine costs as measured earlier; None to
    learn it from the first steps on.

    The rest is for SchedulingOrder.FAIR. `max_num_running_per_tenant`: who has that many slots
    waits, None for no bound. `tenant_weights`: a tenant of weight 2 may be served twice
    as much as one of weight 1, which everybody has who is not named. `prompt_token_weight` and
    `output_token_weight`: what a token counts as service. An output token costs a turn of the whole
    batch where a prompt token shares one, and providers price it two to five times as high; 2 is
    what the fair-serving literature uses (Sheng et al., OSDI 2024).

    `aging_s`: how long a request may be passed over for others' sake before its age counts, inf for
    ever. One in `aging_stride` admissions goes by age while somebody is that old; 1 for all.
    `max_lookahead`: how many who stand behind are tried when the first does not fit (0 for none),
    `max_num_overtakes` and `max_overtake_s`: until that many have passed it, or for that long.
    `max_prefill_share`: of the prefill budget that is left, what one prompt may take while another
    can use the rest (1 for all).

    `tenant_burst_tokens`: weighted tokens by which a tenant that is known and was served less than
    others may be behind them when it comes back, so that a burst of a quiet tenant goes first
    (0: nobody keeps anything). `yield_ratio`: a tenant that would then still hold that many times
    less of slots and blocks than another is light: its prompts go before the other's, and what it
    lacks is taken from the other's running requests; inf to let nobody yield (see shares.py,
    yielders.py).

    Sessions keep the blocks of a dialogue for its next turn (see sessions.py), `session_ttl_s` from
    the last one on, at `session_retention_priority`. `max_session_share`: of all blocks, what they
    may keep together; `max_session_tokens`: what each may keep, the head of its dialogue.

    Requests may ask for a cache retention above the default (see block_claims.py):
    `max_retention_share` and `max_tenant_retention_share` bound the blocks that have it, of all
    tenants together and of each, as shares of all blocks; `max_retention_s` bounds its duration.

    `eviction`: which cached block makes room.
    """

    max_num_batched_tokens: int = 2048
    admission_policy: AdmissionPolicy = AdmissionPolicy.MAX_UTILIZATION
    watermark: float = 0.01
    max_num_waiting: int = 1024
    max_num_waiting_tokens: int = 4_194_304
    max_num_waiting_per_tenant: int | None = None
    tenant_quota: TenantQuota = NO_QUOTA
    max_num_running_per_tenant: int | None = None
    foresees_deadlines: bool = True
    min_deadline_chance: float = 0.1
    target_itl_s: float | None = None
    known_prices: CostModel | None = None
    order: SchedulingOrder = SchedulingOrder.FAIR
    tenant_weights: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    prompt_token_weight: float = 1.0
    output_token_weight: float = 2.0
    aging_s: float = 30.0
    aging_stride: int = 8
    max_lookahead: int = 16
    max_num_overtakes: int = 32
    max_overtake_s: float = 5.0
    max_prefill_share: float = 0.5
    tenant_burst_tokens: float = 32_768.0
    yield_ratio: float = 4.0
    session_ttl_s: float = 300.0
    session_retention_priority: int = 60
    max_session_share: float = 0.5
    max_session_tokens: int = 32_768
    max_retention_share: float = 0.5
    max_tenant_retention_share: float = 0.25
    max_retention_s: float = 3600.0
    eviction: EvictionPolicy = EvictionPolicy.HIT_DENSITY

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError("watermark must be in [0, 1)")
        if not 0.0 <= self.min_deadline_chance < 1.0:
            raise ValueError("min_deadline_chance must be in [0, 1)")
        target_s = self.target_itl_s
        if target_s is not None and not (math.isfinite(target_s) and target_s > 0.0):
            raise ValueError("target_itl_s must be finite and above 0")
        self._check_order()
        self._check_sessions()
        self._check_retention()
        if self.order is SchedulingOrder.FCFS and self.max_num_running_per_tenant is not None:
            raise ValueError("max_num_running_per_tenant needs the order FAIR")
        self._check_weights()

    def _check_order(self) -> None:
        if not self.aging_s > 0.0:
            raise ValueError("aging_s must be above 0")
        if not self.yield_ratio > 1.0:
            raise ValueError("yield_ratio must be above 1")
        if not 0.0 < self.max_prefill_share <= 1.0:
            raise ValueError("max_prefill_share must be in (0, 1]")

    def _check_sessions(self) -> None:
        if not 0.0 < self.max_session_share <= 1.0:
            raise ValueError("max_session_share must be in (0, 1]")
        if not (math.isfinite(self.session_ttl_s) and self.session_ttl_s > 0.0):
            raise ValueError("session_ttl_s must be finite and above 0")
        if not DEFAULT_RETENTION_PRIORITY < self.session_retention_priority <= 100:
            least = DEFAULT_RETENTION_PRIORITY + 1
            raise ValueError(f"session_retention_priority must be in {least} .. 100")

    def _check_retention(self) -> None:
        for name in ("max_retention_share", "max_tenant_retention_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be in [0, 1]")
        if not (math.isfinite(self.max_retention_s) and self.max_retention_s > 0.0):
            raise ValueError("max_retention_s must be finite and above 0")

    def _check_weights(self) -> None:
        for name in ("prompt_token_weight", "output_token_weight"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite")
        if not self.prompt_token_weight + self.output_token_weight > 0.0:
            raise ValueError("prompt_token_weight and output_token_weight must not both be 0")
        check_weights(self.tenant_weights)


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise ValueError naming the tenant whose weight is off."""
    for tenant, weight in weights.items():
        if not 1.0 / MAX_WEIGHT <= weight <= MAX_WEIGHT:
            raise ValueError(
                f"tenant_weights[{tenant!r}] must be in {1.0 / MAX_WEIGHT:g} .. {MAX_WEIGHT:g}"
            )
