"""`TorchLlmArgs`: the validated arguments of `LLM(...)`."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any, TypeVar

from tensorrt_llm.llmapi.llm_configs import (
    CudaGraphConfig,
    KvCacheConfig,
    LoraConfig,
    MoeConfig,
    PeftCacheConfig,
    SchedulerConfig,
)
from tensorrt_llm.llmapi.speculative import DecodingBaseConfig
from tensorrt_llm.llmapi.strict_model import StrictModel, ValidationError, within

ModelT = TypeVar("ModelT", bound=StrictModel)
TRT_ONLY_KEYS = frozenset(
    {"enable_tqdm", "workspace", "enable_build_cache", "extended_runtime_perf_knob_config"}
    | {"fast_build", "calib_config", "quant_config", "embedding_parallel_mode"}
    | {"enable_prompt_adapter", "max_prompt_adapter_token", "batching_type", "normalize_log_probs"}
)
"""Fields of the TensorRT backend's arguments; the exact set is from memory."""


class TorchLlmArgs(StrictModel):
    """Arguments of the PyTorch backend."""

    model: str | Path
    tokenizer: Any = None
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    gpus_per_node: int | None = None
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    max_batch_size: int | None = 2048
    max_num_tokens: int | None = 8192
    max_input_len: int | None = 1024
    max_seq_len: int | None = None
    max_beam_width: int | None = 1
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    enable_chunked_prefill: bool = False
    cuda_graph_config: CudaGraphConfig | None = field(default_factory=CudaGraphConfig)
    disable_overlap_scheduler: bool = False
    stream_interval: int = 1
    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None
    guided_decoding_backend: str | None = None
    enable_lora: bool = False
    lora_config: LoraConfig | None = None
    peft_cache_config: PeftCacheConfig | None = None
    speculative_config: DecodingBaseConfig | None = None
    batched_logits_processor: Any = None
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    iter_stats_max_iterations: int | None = None
    request_stats_max_iterations: int | None = None
    return_perf_metrics: bool = False
    perf_metrics_max_requests: int = 0
    otlp_traces_endpoint: str | None = None
    gather_generation_logits: bool = False
    batch_wait_timeout_ms: float = 0
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0
    sampler_type: str = "auto"
    attn_backend: str = "TRTLLM"
    garbage_collection_gen0_threshold: int = 20000
    orchestrator_type: str | None = None
    env_overrides: dict[str, str] | None = None
    backend: str | None = "pytorch"
    print_iter_log: bool = False
    max_stats_len: int = 1000
    custom_tokenizer: str | None = None
    disable_flashinfer_sampling: bool = False
    enable_sleep: bool = False
    layer_wise_benchmarks_config: Any = None
    model_kwargs: dict[str, Any] | None = None
    nvfp4_gemm_config: Any = None
    pp_partition: list[int] | None = None
    ray_placement_config: Any = None
    sampler_force_async_worker: bool = False
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    moe_config: MoeConfig = field(default_factory=MoeConfig)
    enable_attention_dp: bool = False
    enable_lm_head_tp_in_adp: bool = False
    attention_dp_config: Any = None
    cp_config: dict[str, Any] | None = field(default_factory=dict)
    load_format: str = "auto"
    fail_fast_on_attention_window_too_large: bool = False
    cache_transceiver_config: Any = None
    sparse_attention_config: Any = None
    reasoning_parser: str | None = None
    decoding_config: Any = None
    torch_compile_config: Any = None
    enable_autotuner: bool = True
    enable_layerwise_nvtx_marker: bool = False
    enable_min_latency: bool = False
    force_dynamic_quantization: bool = False
    allreduce_strategy: str | None = "AUTO"
    checkpoint_loader: Any = None
    checkpoint_format: str | None = None
    kv_connector_config: Any = None
    mm_encoder_only: bool = False
    ray_worker_extension_cls: str | None = None

    def __post_init__(self) -> None:
        self.kv_cache_config = _nested(KvCacheConfig, self.kv_cache_config)
        self.scheduler_config = _nested(SchedulerConfig, self.scheduler_config)
        if self.cuda_graph_config is not None:
            self.cuda_graph_config = _nested(CudaGraphConfig, self.cuda_graph_config)
        if self.lora_config is not None:
            self.lora_config = _nested(LoraConfig, self.lora_config)
        if self.guided_decoding_backend not in (None, "xgrammar", "llguidance"):
            raise ValidationError("guided_decoding_backend must be 'xgrammar' or 'llguidance'")
        if self.sampler_type not in ("auto", "TorchSampler", "TRTLLMSampler"):
            raise ValidationError("sampler_type: auto, TorchSampler or TRTLLMSampler")
        if self.stream_interval < 1:
            raise ValidationError("stream_interval must be positive")
        draft = self.speculative_config
        if draft is not None:
            draft = _nested(DecodingBaseConfig, draft)
            if not draft.supports_backend(self.backend or "tensorrt"):
                raise ValidationError(
                    f"{type(draft).__name__} does not support backend {self.backend}"
                )
        within(
            "TorchLlmArgs", "batch_wait_max_tokens_ratio", self.batch_wait_max_tokens_ratio, 0, 1
        )

    @property
    def world_size(self) -> int:
        """Devices over which the model is spread."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size


def _nested(kind: type[ModelT], value: Any) -> ModelT:
    """Convert a dictionary to its model, as pydantic does."""
    if isinstance(value, dict):
        return kind(**value)
    if not isinstance(value, kind):
        raise ValidationError(
            f"Input should be a valid {kind.__name__}, got {type(value).__name__}"
        )
    return value


class TrtLlmArgs(TorchLlmArgs):
    """Arguments of the TensorRT backend: only some of its fields, from memory."""

    backend: str | None = None
    build_config: Any = None
    mpi_session: Any = None
    enable_build_cache: bool = False
    fast_build: bool = False
    batching_type: str | None = None
    normalize_log_probs: bool = False
    extended_runtime_perf_knob_config: Any = None
