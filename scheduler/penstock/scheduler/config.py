"""The scheduler's settings: frozen, validated once."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.quotas import NO_QUOTA, TenantQuota
from penstock.scheduler.request_options import DEFAULT_RETENTION_PRIORITY
from penstock.scheduler.setting import SettingError, check, made_by, setting

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
    """Limits and policy. Raises SettingError naming the field that is off.

    `tenant_quota`: what each tenant may use that was given no quota of its own. A tenant of weight
    2 in `tenant_weights` may be served twice as much as one of weight 1, the default.
    `min_deadline_chance`: see completion.py; `target_itl_s`: see pacing.py.

    These are for SchedulingOrder.FAIR. `prompt_token_weight` and `output_token_weight`: what a
    token counts as service. An output token costs a turn of the whole batch where a prompt token
    shares one, and providers price it two to five times as high; 2 is what the fair-serving
    literature uses (Sheng et al., OSDI 2024). One in `aging_stride` admissions goes by age while a
    request is older than `aging_s`; 1 for all. `max_lookahead`: how many requests behind the first
    are tried when it does not fit (0 for none), until `max_num_overtakes` have passed it, or for
    `max_overtake_s`. `tenant_burst_tokens`: weighted tokens by which a tenant that is known and was
    served less than others may be behind them when it comes back, so that a burst of a quiet tenant
    goes first (0: no credit). `yield_ratio`: a tenant that would then still hold that many times
    less of slots and blocks than another is light: its prompts go before the other's, and what it
    lacks is taken from the other's running requests; inf to switch that off (see shares.py,
    yielders.py).

    Sessions keep the blocks of a dialogue for its next turn (see sessions.py). Requests may ask for
    a cache retention above the default (see block_claims.py).
    """

    max_num_batched_tokens: int = setting(
        2048, "batching", "token budget of one step", at_least=1, shown="2048, on a GPU 4096"
    )
    admission_policy: AdmissionPolicy = setting(
        AdmissionPolicy.MAX_UTILIZATION, "batching", "when a waiting request may run"
    )
    watermark: float = setting(
        0.01,
        "batching",
        "share of the KV cache that admission under max_utilization leaves free",
        at_least=0,
        below=1,
    )
    max_num_waiting: int = setting(1024, "queue", "requests that may wait", at_least=1)
    max_num_waiting_tokens: int = setting(
        4_194_304, "queue", "prompt tokens that may wait, all requests together", at_least=1
    )
    max_num_waiting_per_tenant: int | None = setting(
        None, "tenants", "requests of one tenant that may wait", at_least=1, shown="no limit"
    )
    tenant_quota: TenantQuota = NO_QUOTA
    max_num_running_per_tenant: int | None = setting(
        None, "tenants", "requests of one tenant that may run at once", at_least=1, shown="no limit"
    )
    foresees_deadlines: bool = setting(
        True,
        "deadlines",
        "whether a request that cannot meet its deadline is refused before it passes",
        name="foresee_deadlines",
    )
    min_deadline_chance: float = setting(
        0.1,
        "deadlines",
        "smallest probability of a whole answer before its deadline, by the lengths of earlier"
        " outputs: a request with less is rejected or given up; 0 judges by min_tokens alone",
        at_least=0,
        below=1,
    )
    target_itl_s: float | None = setting(
        None,
        "batching",
        "milliseconds between two tokens of a running request, which prefill must leave it",
        name="target_itl_ms",
        scale=1e-3,
        above=0,
        shown="no target",
    )
    known_prices: CostModel | None = setting(
        None,
        "batching",
        "what a step costs here, four prices of 0 to 3600 seconds, as penstock simulate"
        " --calibrate-from prints it",
        name="step_prices",
        needs_all=True,
        shown="learnt from the first steps",
    )
    order: SchedulingOrder = setting(
        SchedulingOrder.FAIR,
        "queue",
        "which request goes next: tenants by their share and the earliest deadline, or first"
        " come, first served",
    )
    tenant_weights: Mapping[str, float] = made_by(
        dict[str, float],
        "tenants",
        "shares of tenants, 1e-6 to 1e6; a tenant that is not named has 1",
        metavar="NAME=WEIGHT,...",
        shown="1 each",
        is_hashed=False,
    )
    prompt_token_weight: float = setting(1.0, at_least=0)
    output_token_weight: float = setting(2.0, at_least=0)
    aging_s: float = setting(
        30.0,
        "queue",
        "seconds after which a request that others passed counts as more urgent, inf for never",
        above=0,
        may_be_infinite=True,
    )
    aging_stride: int = setting(8, at_least=1)
    max_lookahead: int = setting(16, at_least=0)
    max_num_overtakes: int = setting(32, at_least=0)
    max_overtake_s: float = setting(5.0, at_least=0, may_be_infinite=True)
    max_prefill_share: float = setting(
        0.5,
        "batching",
        "share of a step's prefill that one prompt may take while others wait for some",
        above=0,
        at_most=1,
    )
    tenant_burst_tokens: float = setting(32_768.0, at_least=0, may_be_infinite=True)
    yield_ratio: float = setting(2.0, above=1, may_be_infinite=True)
    session_ttl_s: float = setting(
        300.0, "cache", "seconds after its last turn that a session's blocks are kept", above=0
    )
    session_retention_priority: int = setting(
        60,
        "cache",
        "higher keeps blocks of sessions longer against requests with a retention of their own",
        at_least=DEFAULT_RETENTION_PRIORITY + 1,
        at_most=100,
    )
    max_session_share: float = setting(
        0.5, "cache", "share of the KV cache that all sessions may keep", above=0, at_most=1
    )
    max_tenant_session_share: float = setting(
        0.25,
        "cache",
        "the same of one tenant's sessions, where tenants have names",
        above=0,
        at_most=1,
    )
    max_session_tokens: int = setting(
        32_768, "cache", "tokens of one dialogue that its session may keep", at_least=1
    )
    max_retention_share: float = setting(
        0.5,
        "cache",
        "share of the KV cache that requests may keep above the default retention priority",
        at_least=0,
        at_most=1,
    )
    max_tenant_retention_share: float = setting(
        0.25, "cache", "the same of one tenant", at_least=0, at_most=1
    )
    max_retention_s: float = setting(
        3600.0, "cache", "longest time that such a retention lasts, seconds", above=0
    )
    eviction: EvictionPolicy = setting(
        EvictionPolicy.HIT_DENSITY,
        "cache",
        "which cached block makes room: the one likely to bring the fewest hits for its time,"
        " or the one used longest ago",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.order is SchedulingOrder.FCFS and self.max_num_running_per_tenant is not None:
            raise SettingError("{} needs the order FAIR", "max_num_running_per_tenant")
        if not self.prompt_token_weight + self.output_token_weight > 0.0:
            raise SettingError(
                "{} and {} must not both be 0", "prompt_token_weight", "output_token_weight"
            )
        check_weights(self.tenant_weights)


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise SettingError naming the tenant whose weight is off."""
    for tenant, weight in weights.items():
        if not 1.0 / MAX_WEIGHT <= weight <= MAX_WEIGHT:
            raise SettingError(
                f"{{}}[{tenant!r}] must be in {1.0 / MAX_WEIGHT:g} .. {MAX_WEIGHT:g}",
                "tenant_weights",
            )
