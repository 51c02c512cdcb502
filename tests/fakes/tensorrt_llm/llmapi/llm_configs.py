"""The settings classes of an engine, generated from the recorded facts, and the checks of their
values.
"""

from datetime import timedelta
from typing import Any

from tensorrt_llm.recorded import ValidationError, recorded

_API = "tensorrt_llm.llmapi"


def _check_graphs(graphs: Any) -> None:
    # Later versions take both when they agree.
    if graphs.batch_sizes and graphs.max_batch_size:
        raise ValidationError(
            "Please don't set both cuda_graph_config.batch_sizes and "
            "cuda_graph_config.max_batch_size"
        )


def _check_retention(priority: int, duration: object) -> None:
    if not 0 <= priority <= 100:
        raise ValueError("Retention priority must be in [0, 100]")
    if not (duration is None or isinstance(duration, timedelta)):
        raise TypeError("duration_ms is a datetime.timedelta")


CapacitySchedulerPolicy = recorded(f"{_API}.CapacitySchedulerPolicy")
ContextChunkingPolicy = recorded(f"{_API}.ContextChunkingPolicy")
DynamicBatchConfig = recorded(f"{_API}.DynamicBatchConfig")
SchedulerConfig = recorded(f"{_API}.SchedulerConfig")
CudaGraphConfig = recorded(f"{_API}.CudaGraphConfig", _check_graphs)
MoeConfig = recorded(f"{_API}.MoeConfig")
KvCacheConfig = recorded(f"{_API}.KvCacheConfig")
PeftCacheConfig = recorded(f"{_API}.llm_configs.PeftCacheConfig")
LoraConfig = recorded("tensorrt_llm.lora_helper.LoraConfig")
TorchLlmArgs = recorded(f"{_API}.TorchLlmArgs")
TrtLlmArgs = recorded(f"{_API}.TrtLlmArgs")
KvCacheRetentionConfig = recorded(
    f"{_API}.KvCacheRetentionConfig",
    lambda self: _check_retention(self.decode_retention_priority, self.decode_duration_ms),
)
KvCacheRetentionConfig.TokenRangeRetentionConfig = recorded(
    f"{_API}.KvCacheRetentionConfig.TokenRangeRetentionConfig",
    lambda self: _check_retention(self.priority, self.duration_ms),
)
