"""The parts of the engine's configuration, with their defaults."""

from __future__ import annotations

import enum
from dataclasses import field

from tensorrt_llm.llmapi.strict_model import StrictModel, ValidationError, within


class CapacitySchedulerPolicy(enum.StrEnum):
    """What the engine guarantees an admitted request."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class ContextChunkingPolicy(enum.StrEnum):
    """How prompt chunks share a step."""

    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"


class DynamicBatchConfig(StrictModel):
    """Settings of the TensorRT backend; accepted, without effect on PyTorch."""

    enable_batch_size_tuning: bool
    enable_max_num_tokens_tuning: bool
    dynamic_batch_moving_average_window: int


class SchedulerConfig(StrictModel):
    """Policies of the engine's scheduler."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None

    def __post_init__(self) -> None:
        try:
            self.capacity_scheduler_policy = CapacitySchedulerPolicy(self.capacity_scheduler_policy)
            if self.context_chunking_policy is not None:
                self.context_chunking_policy = ContextChunkingPolicy(self.context_chunking_policy)
        except ValueError as error:
            raise ValidationError(f"SchedulerConfig: {error}") from error


class CudaGraphConfig(StrictModel):
    """Which batches are captured as graphs; validated, without effect here."""

    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False

    def __post_init__(self) -> None:
        if self.max_batch_size < 0:
            raise ValidationError("CudaGraphConfig.max_batch_size must be non-negative")
        # Later versions take both when they agree.
        if self.batch_sizes and self.max_batch_size:
            raise ValidationError(
                "Please don't set both cuda_graph_config.batch_sizes and "
                "cuda_graph_config.max_batch_size"
            )


class MoeConfig(StrictModel):
    """Mixture of experts; without effect here."""

    backend: str = "CUTLASS"


class LoraConfig(StrictModel):
    """Adapters; overrides `enable_lora`."""

    lora_dir: list[str] = field(default_factory=list)
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = field(default_factory=list)
    trtllm_modules_to_hf_modules: dict[str, str] = field(default_factory=dict)
    max_loras: int | None = None
    max_cpu_loras: int | None = None


class PeftCacheConfig(StrictModel):
    """Cache of adapters; without effect here."""

    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = 8
    max_adapter_size: int = 64
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 8
    device_cache_percent: float = 0.02
    host_cache_size: int = 1024**3
    lora_prefetch_dir: str | None = None


class KvCacheConfig(StrictModel):
    """The page pool."""

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = 0
    dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    tokens_per_block: int = 32

    def __post_init__(self) -> None:
        within("KvCacheConfig", "free_gpu_memory_fraction", self.free_gpu_memory_fraction, 0, 1)
        if self.max_tokens is not None and self.max_tokens <= 0:
            raise ValidationError("KvCacheConfig.max_tokens must be positive")
        if self.tokens_per_block <= 0 or self.tokens_per_block & (self.tokens_per_block - 1):
            raise ValidationError("KvCacheConfig.tokens_per_block must be a power of two")
