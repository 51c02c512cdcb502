"""The scheduler's settings: immutable and validated at construction."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.quotas import NO_QUOTA, TenantQuota
from penstock.scheduler.request import DEFAULT_RETENTION_LEVEL
from penstock.scheduler.setting import Setting, SettingError, check, from_factory, setting

STEP_TOKENS = 2048
"""Default token budget of a step."""
GPU_STEP_TOKENS = 3584
"""The same on a GPU. Other requests wait while a prefill chunk fills the step. Twice as many tokens
gain less than 1 % of throughput and double the longest inter-token gap."""
TENANT_WEIGHT = Setting(at_least=1e-6, at_most=1e6)
"""The bounds of a tenant's weight; service is counted in floats."""


class AdmissionPolicy(enum.Enum):
    """When a waiting request may take a slot. The names are the same as in TensorRT-LLM.

    GUARANTEED_NO_EVICT reserves blocks up to `max_tokens`: running requests are never preempted.
    MAX_UTILIZATION allocates only the blocks needed now, above a watermark: more requests run
    together, and when blocks run out one is preempted and recomputed later.
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
    """Which cached block is evicted first, among blocks at the default retention level.

    HIT_DENSITY: the block with the fewest expected hits per unit of time in the cache, learned from
    traffic (see hit_density.py). LRU: the least recently used block.
    """

    HIT_DENSITY = "hit_density"
    LRU = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The settings of one scheduler. Raises SettingError naming the invalid field.

    The fields from `prompt_token_weight` to `yield_ratio` apply to SchedulingOrder.FAIR only.
    Sessions keep the blocks of a conversation for its next turn (see sessions.py). Requests may set
    a cache retention above the default (see retention.py).

    Attributes:
        tenant_quota: The quota of tenants without a configured quota.
        tenant_weights: A tenant of weight 2 may be served twice as much as one of weight 1, the
            default.
        min_deadline_chance: Requests with a lower probability of meeting their deadline are
            rejected, dropped or ended; see completion.py.
        target_itl_s: The target inter-token latency, seconds; see latency_target.py.
        prompt_token_weight, output_token_weight: How much service one prompt token and one output
            token count as. Output counts more, since each output token needs a step while the
            tokens of a prompt share one; 2 is the value of Sheng et al., OSDI 2024.
        aging_stride: While the first request by age (see fair_order.py) has waited for `aging_s` or
            longer, age decides one in `aging_stride` admissions; 1: every admission.
        max_lookahead: How many later requests a step tries when the first does not fit; 0 for none.
            Later requests are tried until `max_num_overtakes` of them have overtaken the first, or
            for `max_overtake_s`.
        tenant_burst_tokens: Credit, in weighted tokens, of a known tenant that returns after being
            idle: its service counter may be this far below the counters of other tenants, so that
            its burst goes first. 0: no credit.
        yield_ratio: A tenant is under its share if another tenant's weighted share of the slots or
            blocks (the greater of the two) is at least this many times its own, counted with its
            new request. Its prompts then go before the prompts of the other tenant, and running
            requests of the other tenant may be preempted. With many tenants the ratio is doubled;
            inf disables this (see fair_share.py, victims.py).
    """

    max_num_batched_tokens: int = setting(
        STEP_TOKENS,
        "batching",
        "maximum tokens of one step",
        at_least=1,
        shown=f"{STEP_TOKENS}, on a GPU {GPU_STEP_TOKENS}",
    )
    admission_policy: AdmissionPolicy = setting(
        AdmissionPolicy.MAX_UTILIZATION,
        "batching",
        "blocks that admission reserves: for the whole output, or as needed (may preempt)",
    )
    watermark: float = setting(
        0.01,
        "batching",
        "share of the KV cache that admission under max_utilization leaves free",
        at_least=0,
        below=1,
    )
    max_num_waiting: int = setting(1024, "queue", "maximum number of waiting requests", at_least=1)
    max_num_waiting_tokens: int = setting(
        4_194_304,
        "queue",
        "maximum prompt tokens of all waiting requests, with the output of preempted ones",
        at_least=1,
    )
    max_num_waiting_per_tenant: int | None = setting(
        None, "tenants", "maximum waiting requests of one tenant", at_least=1, shown="no limit"
    )
    tenant_quota: TenantQuota = NO_QUOTA
    max_num_running_per_tenant: int | None = setting(
        None, "tenants", "maximum running requests of one tenant", at_least=1, shown="no limit"
    )
    deadline_admission: bool = setting(
        True,
        "deadlines",
        "whether requests that are predicted to miss their deadlines are rejected",
    )
    min_deadline_chance: float = setting(
        0.1,
        "deadlines",
        "minimum probability that the output is complete before its deadline, estimated from"
        " earlier output lengths; a request below it is rejected or ended; 0: use min_tokens only",
        at_least=0,
        below=1,
    )
    target_itl_s: float | None = setting(
        None,
        "batching",
        "target inter-token latency of running requests, milliseconds; limits prefill",
        name="target_itl_ms",
        scale=1e-3,
        above=0,
        shown="no target",
    )
    known_cost: CostModel | None = setting(
        None,
        "batching",
        "cost model of a step, as printed by penstock simulate --calibrate-from; docs/settings.md"
        " lists the keys",
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
    tenant_weights: Mapping[str, float] = from_factory(
        dict[str, float],
        "tenants",
        "fair-share weights of tenants; other tenants have 1",
        metavar="NAME=WEIGHT,...",
        shown="1 each",
        is_hashed=False,
        at_least=TENANT_WEIGHT.at_least,
        at_most=TENANT_WEIGHT.at_most,
    )
    prompt_token_weight: float = setting(
        1.0, text="service that one prompt token counts as; order fair", at_least=0
    )
    output_token_weight: float = setting(
        2.0, text="service that one output token counts as; order fair", at_least=0
    )
    aging_s: float = setting(
        30.0,
        "queue",
        "seconds of waiting that raise a request's priority by one, inf for never",
        above=0,
        may_be_infinite=True,
    )
    aging_stride: int = setting(
        8,
        text="while the oldest request waits longer than aging_s, age decides one in N admissions",
        at_least=1,
    )
    max_lookahead: int = setting(
        16, text="later requests that a step tries when the first does not fit", at_least=0
    )
    max_num_overtakes: int = setting(
        32, text="later requests that may overtake the first", at_least=0
    )
    max_overtake_s: float = setting(
        5.0,
        text="time for which requests may overtake the first, seconds",
        at_least=0,
        may_be_infinite=True,
    )
    max_prefill_share: float = setting(
        0.5,
        "batching",
        "share of a step's prefill budget that one prompt may take while others wait",
        above=0,
        at_most=1,
    )
    tenant_burst_tokens: float = setting(
        32_768.0,
        text="credit of a tenant that returns after being idle, weighted tokens",
        at_least=0,
        may_be_infinite=True,
    )
    yield_ratio: float = setting(
        2.0,
        text="a tenant is under its share if another has at least X times its weighted share of"
        " slots or blocks; Infinity disables this",
        above=1,
        may_be_infinite=True,
    )
    session_ttl_s: float = setting(
        300.0, "cache", "seconds after its last turn that a session's blocks are kept", above=0
    )
    session_retention_level: int = setting(
        60,
        "cache",
        "retention level of session blocks; blocks with a higher level are kept longer",
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
        32_768, "cache", "maximum tokens kept for one session", at_least=1
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
        "the same limit for the requests of one tenant",
        at_least=0,
        at_most=1,
    )
    max_retention_s: float = setting(
        3600.0, "cache", "maximum duration of a retention above the default level, seconds", above=0
    )
    eviction: EvictionPolicy = setting(
        EvictionPolicy.HIT_DENSITY,
        "cache",
        "cached block to evict first: the one with the fewest expected hits per time, or the least"
        " recently used",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.order is SchedulingOrder.FCFS and self.max_num_running_per_tenant is not None:
            raise SettingError("{} requires the order FAIR", "max_num_running_per_tenant")
        if not self.prompt_token_weight + self.output_token_weight > 0.0:
            raise SettingError(
                "{} and {} must not both be 0", "prompt_token_weight", "output_token_weight"
            )
        check_weights(self.tenant_weights)


def check_step_tokens(num_tokens: int, num_seqs: int, tokens_name: str, seqs_name: str) -> None:
    """Raise SettingError with the values of the two fields if a step of `num_tokens` cannot have a
    token of each of `num_seqs` running requests.
    """
    if num_tokens < num_seqs:
        raise SettingError(
            f"{{}} must be at least {{}} ({num_seqs}), not {num_tokens}", tokens_name, seqs_name
        )


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise SettingError naming the first tenant whose weight is out of range."""
    for tenant, weight in weights.items():
        fault = TENANT_WEIGHT.fault(weight)
        if fault:
            raise SettingError(f"{{}}[{tenant!r}] {fault}", "tenant_weights")
