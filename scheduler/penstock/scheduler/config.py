"""The scheduler's settings: frozen, validated once."""

import enum
from dataclasses import dataclass


class AdmissionPolicy(enum.Enum):
    """When a waiting request may take a slot; the names are TensorRT-LLM's.

    GUARANTEED_NO_EVICT reserves blocks up to `max_tokens`: who is in stays in.
    MAX_UTILIZATION takes what is needed now above a watermark: more run at once, and when blocks
    run out the most junior is preempted and recomputed later.
    """

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy. Raises ValueError naming the field that is off.

    `max_num_batched_tokens`: the token budget of one step. `watermark`: share of all blocks kept
    free at admission under MAX_UTILIZATION. `max_num_waiting` and `max_num_waiting_tokens`
    (prompt tokens) bound the queue.
    """

    max_num_batched_tokens: int = 2048
    admission_policy: AdmissionPolicy = AdmissionPolicy.MAX_UTILIZATION
    watermark: float = 0.01
    max_num_waiting: int = 1024
    max_num_waiting_tokens: int = 4_194_304

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1:
            raise ValueError("max_num_batched_tokens must be at least 1")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError("watermark must be in [0, 1)")
        if self.max_num_waiting < 1:
            raise ValueError("max_num_waiting must be at least 1")
        if self.max_num_waiting_tokens < 1:
            raise ValueError("max_num_waiting_tokens must be at least 1")
