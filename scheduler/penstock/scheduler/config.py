"""The scheduler's settings: frozen, validated once."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.quotas import NO_QUOTA, TenantQuota
from penstock.scheduler.request import DEFAULT_RETENTION_LEVEL
from penstock.scheduler.setting import SettingError, check, made_by, setting

MAX_WEIGHT = 1e6
"""Limit of a tenant's weight, and of its reciprocal: service is counted in floats."""


class AdmissionPolicy(enum.Enum):
    """When a waiting request may take a slot; the names are TensorRT-LLM's.

    GUARANTEED_NO_EVICT reserves blocks up to `max_tokens`: running requests are never preempted.
    MAX_UTILIZATION takes what is needed now above a watermark: more run at once, and when blocks
    run out a request is preempted and recomputed later.
    """

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"


class SchedulingOrder(enum.Enum):
    """The order of the queue.

    FAIR: priority classes, tenants inside a class by weighted service, earliest deadline inside a
    tenant; small requests may overtake a large one for a while (see fair_order.py,
    batch_admission.py). FCFS: priority classes, then arrival, without overtaking, as in other
    engines.
    """

    FAIR = "fair"
    FCFS = "fcfs"


class EvictionPolicy(enum.Enum):
    """Which cached block is evicted first, among blocks without a retention.

    HIT_DENSITY: the one with the fewest expected hits for its residency, learned from the traffic
    (see hit_density.py). LRU: the least recently used.
    """

    HIT_DENSITY = "hit_density"
    LRU = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy. Raises SettingError naming the invalid field.

    `tenant_quota`: the quota of each tenant without a separate one. A tenant of weight 2 in
    `tenant_weights` may be served twice as much as one of weight 1, the default.
    `min_deadline_chance`: see completion.py; `target_itl_s`: see latency_target.py.

    The following apply to SchedulingOrder.FAIR. `prompt_token_weight` and `output_token_weight`:
    the service that a token counts as. An output token takes a step of the whole batch, a prompt
    token shares one, and providers price output two to five times as high; 2 is the value in the
    fair-serving literature (Sheng et al., OSDI 2024). One in `aging_stride` admissions goes by age
    while a request is older than `aging_s`; 1: all of them. `max_lookahead`: how many requests
    behind the first are tried when the first does not fit (0 for none), until `max_num_overtakes`
    have overtaken it, or for `max_overtake_s`. `tenant_burst_tokens`: weighted tokens by which the
    counter of a returning known tenant may be below those of others, so that a burst of a quiet
    tenant goes first (0: no credit). `yield_ratio`: a tenant is under its share ("light") if, with
    the new request, it would still hold this many times less of slots and blocks than another
    tenant: its prompts go before the other's, and running requests of the other are preempted for
    what it lacks; inf to switch this off (see fair_share.py, victims.py).

    Sessions keep the blocks of a conversation for its next turn (see sessions.py). Requests may ask
    for a cache retention above the default (see retention.py).
    """

    max_num_batched_tokens: int = setting(
        2048, "batching", "token budget of one step", at_least=1, shown="2048, on a GPU 3584"
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
    deadline_admission: bool = setting(
        True,
        "deadlines",
        "whether requests that are predicted to miss their deadlines are refused",
        name="deadline_admission",
    )
    min_deadline_chance: float = setting(
        0.1,
        "deadlines",
        "smallest probability of a whole answer before its deadline, by the lengths of earlier"
        " outputs: a request with less is refused or ended; 0 considers min_tokens alone",
        at_least=0,
        below=1,
    )
    target_itl_s: float | None = setting(
        None,
        "batching",
        "target for the milliseconds between two tokens of a running request; bounds prefill",
        name="target_itl_ms",
        scale=1e-3,
        above=0,
        shown="no target",
    )
    known_cost: CostModel | None = setting(
        None,
        "batching",
        "cost model of a step: four coefficients of 0 to 3600 seconds, as printed by penstock"
        " simulate --calibrate-from",
        name="step_cost",
        needs_all=True,
        shown="learned from the first steps",
    )
    order: SchedulingOrder = setting(
        SchedulingOrder.FAIR,
        "queue",
        "order of the queue: tenants by fair share and the earliest deadline, or first come,"
        " first served",
    )
    tenant_weights: Mapping[str, float] = made_by(
        dict[str, float],
        "tenants",
        "fair-share weights of tenants, 1e-6 to 1e6; other tenants have 1",
        metavar="NAME=WEIGHT,...",
        shown="1 each",
        is_hashed=False,
    )
    prompt_token_weight: float = setting(1.0, at_least=0)
    output_token_weight: float = setting(2.0, at_least=0)
    aging_s: float = setting(
        30.0,
        "queue",
        "seconds of waiting that raise a request's priority by one, inf for never",
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
        "share of a step's prefill budget that one prompt may take while others wait",
        above=0,
        at_most=1,
    )
    tenant_burst_tokens: float = setting(32_768.0, at_least=0, may_be_infinite=True)
    yield_ratio: float = setting(2.0, above=1, may_be_infinite=True)
    session_ttl_s: float = setting(
        300.0, "cache", "seconds after its last turn that a session's blocks are kept", above=0
    )
    session_retention_level: int = setting(
        60,
        "cache",
        "retention level of session blocks, compared with requests': higher is kept longer",
        at_least=DEFAULT_RETENTION_LEVEL + 1,
        at_most=100,
    )
    max_session_share: float = setting(
        0.5, "cache", "share of the KV cache that all sessions may keep", above=0, at_most=1
    )
    max_tenant_session_share: float = setting(
        0.25,
        "cache",
        "share of the KV cache that one tenant's sessions may keep",
        above=0,
        at_most=1,
    )
    max_session_tokens: int = setting(
        32_768, "cache", "tokens of one session that may be kept", at_least=1
    )
    max_retention_share: float = setting(
        0.5,
        "cache",
        "share of the KV cache that requests may keep above the default retention level",
        at_least=0,
        at_most=1,
    )
    max_tenant_retention_share: float = setting(
        0.25,
        "cache",
        "share of the KV cache that one tenant's requests may keep so",
        at_least=0,
        at_most=1,
    )
    max_retention_s: float = setting(
        3600.0, "cache", "longest duration of such a retention, seconds", above=0
    )
    eviction: EvictionPolicy = setting(
        EvictionPolicy.HIT_DENSITY,
        "cache",
        "which cached block is evicted: the one with the fewest expected hits for its memory, or"
        " the least recently used",
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
    """Raise SettingError naming the tenant whose weight is invalid."""
    for tenant, weight in weights.items():
        if not 1.0 / MAX_WEIGHT <= weight <= MAX_WEIGHT:
            raise SettingError(
                f"{{}}[{tenant!r}] must be in {1.0 / MAX_WEIGHT:g} .. {MAX_WEIGHT:g}",
                "tenant_weights",
            )
