"""The scheduler's settings: frozen, validated once."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

_COUNTS = (
    "max_num_batched_tokens",
    "max_num_waiting",
    "max_num_waiting_tokens",
    "max_num_waiting_per_tenant",
    "max_num_running_per_tenant",
    "aging_stride",
)
_NOT_NEGATIVE = (
    "prompt_token_weight",
    "output_token_weight",
    "max_lookahead",
    "max_num_overtakes",
    "max_overtake_s",
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy. Raises ValueError naming the field that is off.

    `max_num_batched_tokens`: the token budget of one step. `watermark`: share of all blocks kept
    free at admission under MAX_UTILIZATION. `max_num_waiting` and `max_num_waiting_tokens`
    (prompt tokens) bound the queue, `max_num_waiting_per_tenant` one tenant's part of it, None for
    no bound.

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
    """

    max_num_batched_tokens: int = 2048
    admission_policy: AdmissionPolicy = AdmissionPolicy.MAX_UTILIZATION
    watermark: float = 0.01
    max_num_waiting: int = 1024
    max_num_waiting_tokens: int = 4_194_304
    max_num_waiting_per_tenant: int | None = None
    max_num_running_per_tenant: int | None = None
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
        if not self.aging_s > 0.0:
            raise ValueError("aging_s must be above 0")
        if not 0.0 < self.max_prefill_share <= 1.0:
            raise ValueError("max_prefill_share must be in (0, 1]")
        if self.order is SchedulingOrder.FCFS and self.max_num_running_per_tenant is not None:
            raise ValueError("max_num_running_per_tenant needs the order FAIR")
        self._check_weights()

    def _check_weights(self) -> None:
        for name in ("prompt_token_weight", "output_token_weight"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite")
        if not self.prompt_token_weight + self.output_token_weight > 0.0:
            raise ValueError("prompt_token_weight and output_token_weight must not both be 0")
        for tenant, weight in self.tenant_weights.items():
            if not (math.isfinite(weight) and weight > 0.0):
                raise ValueError(f"tenant_weights[{tenant!r}] must be finite and above 0")
