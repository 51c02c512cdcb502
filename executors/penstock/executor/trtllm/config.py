"""The settings of the TensorRT-LLM executor, under the vendor's names.

Owns the fields, their ranges and their dependencies. Knows neither the model folder (see
`preflight`) nor the installed version (see `llm_args`). Imports nothing heavy: every process of the
service reads the settings.
"""

import enum
from dataclasses import dataclass, field
from pathlib import Path

from penstock.scheduler.setting import SettingError, check, required, setting

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "nvfp4")
_MAX_COUNT = 65_536
"""Limit of the number of requests, GPUs, adapters and so on: a larger number is a typing error."""
_MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1
_MAX_WAIT_S = 1e9
"""About 30 years; 64-bit clocks overflow at ten times this."""


class CapacityPolicy(enum.StrEnum):
    """When a request may run; the engine's CapacitySchedulerPolicy of the same name.

    The engine's third policy, STATIC_BATCH, is not offered: it waits until a whole batch has ended.
    """

    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    MAX_UTILIZATION = "MAX_UTILIZATION"


class ChunkingPolicy(enum.StrEnum):
    """Which prompt gets the tokens of a step; the engine's ContextChunkingPolicy."""

    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"


class SamplerType(enum.StrEnum):
    """The engine's samplers. AUTO selects TORCH."""

    AUTO = "auto"
    TORCH = "TorchSampler"
    TRTLLM = "TRTLLMSampler"


class SamplerPromise(enum.StrEnum):
    """Options that a sampler may silently ignore, depending on its version."""

    PENALTIES = "penalties"
    SEED = "seed"
    MIN_TOKENS = "min_tokens"
    MIN_P = "min_p"


class GuidedDecodingBackend(enum.StrEnum):
    """The compiler of schemas, patterns and grammars to token masks."""

    XGRAMMAR = "xgrammar"
    LLGUIDANCE = "llguidance"


class DecodingType(enum.StrEnum):
    """The kinds of speculative decoding that the PyTorch backend supports."""

    NGRAM = "NGram"
    EAGLE = "Eagle"
    MTP = "MTP"
    DRAFT_TARGET = "DraftTarget"
    AUTO = "AUTO"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheSettings:
    """The engine's KV cache. Raises ValueError naming the field.

    `free_gpu_memory_fraction`: the cache's share of the GPU memory that the weights leave free.
    `max_tokens`: the cache's maximum size, None for the whole share. `enable_block_reuse`: equal
    prefixes share blocks; `enable_partial_reuse`: a block may be shared in part. `host_cache_size`:
    bytes of host memory for blocks evicted from the GPU. `dtype`: "auto" follows the model or, if
    the checkpoint quantises the cache too, the checkpoint.
    """

    free_gpu_memory_fraction: float = setting(0.9, above=0, at_most=1)
    max_tokens: int | None = setting(None, at_least=1, at_most=_MAX_INT64)
    tokens_per_block: int = setting(32, at_least=1, at_most=_MAX_COUNT)
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    host_cache_size: int | None = setting(None, at_least=0, at_most=_MAX_INT64)
    dtype: str = setting("auto", choices=KV_CACHE_DTYPES)

    def __post_init__(self) -> None:
        check(self)
        block = self.tokens_per_block
        if block & (block - 1):
            raise SettingError(f"{{}} must be a power of 2, not {block}", "tokens_per_block")
        if self.max_tokens is not None and self.max_tokens < block:
            raise SettingError(f"{{}} must be at least one block of {block} tokens", "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """The engine's own scheduler. `context_chunking_policy` None: the engine's choice."""

    capacity_scheduler_policy: CapacityPolicy = CapacityPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ChunkingPolicy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphSettings:
    """CUDA graphs of steps without prompts. Raises ValueError naming the field.

    `batch_sizes`: of the captured graphs; empty: the engine chooses them, up to `max_batch_size` if
    it is given. `enable_padding`: other batch sizes use the next larger graph.
    """

    enabled: bool = True
    batch_sizes: tuple[int, ...] = ()
    max_batch_size: int | None = setting(None, at_least=1, at_most=_MAX_COUNT)
    enable_padding: bool = False

    def __post_init__(self) -> None:
        check(self)
        for size in self.batch_sizes:
            if not 1 <= size <= _MAX_COUNT:
                raise SettingError(f"{{}} must be in 1..{_MAX_COUNT}, not {size}", "batch_sizes")
        if self.batch_sizes and self.max_batch_size not in (None, max(self.batch_sizes)):
            raise SettingError(
                f"{{}} must be the largest of {{}}, {max(self.batch_sizes)}, not"
                f" {self.max_batch_size}",
                *("max_batch_size", "batch_sizes"),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One LoRA adapter: its name in requests, its folder, and its id inside the engine."""

    name: str
    path: Path
    id: int = required(at_least=1, at_most=_MAX_INT32)

    def __post_init__(self) -> None:
        check(self)
        if not self.name:
            raise SettingError("{} must not be empty", "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """LoRA adapters. Without adapters the engine runs without LoRA. Raises ValueError naming the
    field.

    `max_loras`: how many the GPU holds at once, None for all. `max_cpu_loras`: how many the host
    memory holds, None for all. `lora_target_modules`: which layers may be adapted, by the engine's
    names; empty: those of the first adapter.
    """

    adapters: tuple[Adapter, ...] = ()
    max_lora_rank: int = setting(64, at_least=1, at_most=_MAX_COUNT)
    max_loras: int | None = setting(None, at_least=1, at_most=_MAX_COUNT)
    max_cpu_loras: int | None = setting(None, at_least=1, at_most=_MAX_COUNT)
    lora_target_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("name", "id"):
            values = [getattr(adapter, name) for adapter in self.adapters]
            if len(set(values)) < len(values):
                raise SettingError(f"{{}} must differ in {name}", "adapters")
        check(self)


_DRAFT_SETTINGS = {
    "max_draft_len": (DecodingType.NGRAM, DecodingType.EAGLE, DecodingType.DRAFT_TARGET),
    "speculative_model": (DecodingType.EAGLE, DecodingType.DRAFT_TARGET),
    "max_matching_ngram_size": (DecodingType.NGRAM,),
    "num_nextn_predict_layers": (DecodingType.MTP,),
}
"""The decoding types that each setting applies to."""
_NEEDED_DRAFT_SETTINGS = ("max_draft_len", "speculative_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSettings:
    """Speculative decoding. Raises ValueError naming the field.

    `max_draft_len`: number of tokens drafted at once; AUTO chooses it, MTP uses
    `num_nextn_predict_layers` instead. `speculative_model`: the folder of the draft model (Eagle,
    DraftTarget). `max_matching_ngram_size`: the longest n-gram of NGram; None: the engine's
    default. `eagle3_one_model`: whether Eagle's model runs inside the target model.
    """

    decoding_type: DecodingType
    max_draft_len: int | None = setting(None, at_least=1, at_most=_MAX_COUNT)
    speculative_model: Path | None = None
    max_matching_ngram_size: int | None = setting(None, at_least=1, at_most=_MAX_COUNT)
    num_nextn_predict_layers: int | None = setting(None, at_least=1, at_most=_MAX_COUNT)
    eagle3_one_model: bool = True

    def __post_init__(self) -> None:
        kind = self.decoding_type
        for name, takers in _DRAFT_SETTINGS.items():
            value = getattr(self, name)
            if value is not None and kind not in takers:
                raise SettingError(f"{{}} has no effect with decoding_type {kind}", name)
            if value is None and kind in takers and name in _NEEDED_DRAFT_SETTINGS:
                raise SettingError(f"{{}} must be given with decoding_type {kind}", name)
        check(self)
        if not self.eagle3_one_model and kind is not DecodingType.EAGLE:
            raise SettingError(f"{{}} has no effect with decoding_type {kind}", "eagle3_one_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """Time limits for the engine, in seconds. Every wait is limited.

    `response_timeout_s`: an engine that owes responses but returns none for this time is dead; a
    request without a response for this time, while others get theirs, fails. `abort_grace_s`: for
    the last response of an aborted request, which never arrives for a request that still waits.
    `load_timeout_s`: for building the engine. `limits_timeout_s`: after the build, for the
    statistics with the engine's limits. `shutdown_timeout_s`: for the engine's own shutdown.
    `max_failures_in_row`: when this many requests in a row fail for reasons that are not theirs,
    the engine is restarted.
    """

    response_timeout_s: float = setting(120.0, above=0, at_most=_MAX_WAIT_S)
    abort_grace_s: float = setting(10.0, above=0, at_most=_MAX_WAIT_S)
    load_timeout_s: float = setting(1800.0, above=0, at_most=_MAX_WAIT_S)
    limits_timeout_s: float = setting(120.0, above=0, at_most=_MAX_WAIT_S)
    shutdown_timeout_s: float = setting(30.0, above=0, at_most=_MAX_WAIT_S)
    max_failures_in_row: int = setting(16, at_least=1, at_most=_MAX_COUNT)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmConfig:
    """The settings of a TensorRT-LLM engine. Raises ValueError naming the field.

    `max_batch_size`: requests that run at once. `max_num_tokens`: tokens of one step.
    `max_seq_len`: prompt and output, None for the model's own. `enable_chunked_prefill` is on,
    unlike the engine's default: without it, a prompt above `max_num_tokens` is refused, and a long
    prompt delays every output by its whole prefill. `sampler_honours`: sampling
    options that the operator guarantees to work in an installed version that this code does not
    know; all other options that a sampler may ignore are refused. Without a
    `guided_decoding_backend` there is no structured output.
    """

    max_batch_size: int = setting(256, at_least=1, at_most=_MAX_COUNT)
    max_num_tokens: int = setting(8192, at_least=1, at_most=_MAX_INT32)
    max_seq_len: int | None = setting(None, at_least=2, at_most=_MAX_INT32)
    tensor_parallel_size: int = setting(1, at_least=1, at_most=_MAX_COUNT)
    pipeline_parallel_size: int = setting(1, at_least=1, at_most=_MAX_COUNT)
    dtype: str = setting("auto", choices=DTYPES)
    trust_remote_code: bool = False
    enable_chunked_prefill: bool = True
    disable_overlap_scheduler: bool = False
    attn_backend: str = "TRTLLM"
    sampler_type: SamplerType = SamplerType.AUTO
    sampler_honours: tuple[SamplerPromise, ...] = ()
    guided_decoding_backend: GuidedDecodingBackend | None = None
    kv_cache_config: KvCacheSettings = field(default_factory=KvCacheSettings)
    scheduler_config: SchedulerSettings = field(default_factory=SchedulerSettings)
    cuda_graph_config: CudaGraphSettings = field(default_factory=CudaGraphSettings)
    lora_config: LoraSettings = field(default_factory=LoraSettings)
    speculative_config: SpeculativeSettings | None = None
    watch: WatchSettings = field(default_factory=WatchSettings)

    def __post_init__(self) -> None:
        check(self)
        if not self.attn_backend:
            raise SettingError("{} must not be empty", "attn_backend")
        if len(set(self.sampler_honours)) < len(self.sampler_honours):
            raise SettingError("{} must not contain duplicates", "sampler_honours")
        if self.max_num_tokens < self.max_batch_size:
            raise SettingError(
                f"{{}} must be at least {{}} ({self.max_batch_size}), not {self.max_num_tokens}",
                *("max_num_tokens", "max_batch_size"),
            )
        self._check_parts()

    def _check_parts(self) -> None:
        """Check dependencies between settings."""
        graphs = self.cuda_graph_config
        for name, size in (
            ("batch_sizes", max(graphs.batch_sizes, default=None)),
            ("max_batch_size", graphs.max_batch_size),
        ):
            if size is not None and size > self.max_batch_size:
                raise ValueError(
                    f"cuda_graph_config.{name} must be at most max_batch_size"
                    f" ({self.max_batch_size}), not {size}"
                )
        if self.sampler_type is SamplerType.TRTLLM and self.speculative_config is not None:
            raise ValueError(
                f"sampler_type {self.sampler_type} does not work with speculative_config"
            )
        capacity = self.scheduler_config.capacity_scheduler_policy
        if capacity is CapacityPolicy.MAX_UTILIZATION and self.guided_decoding_backend is not None:
            # The engine pauses requests, and restarts the constraint of a request that continues
            # (NVIDIA issue #18891).
            raise ValueError(
                f"scheduler_config.capacity_scheduler_policy {capacity} does not work with"
                " guided_decoding_backend: a paused output would break its constraint"
            )
        block = self.kv_cache_config.tokens_per_block
        if self.enable_chunked_prefill and self.max_num_tokens < block:
            # Prompts are split at block boundaries.
            raise ValueError(
                f"max_num_tokens must be at least kv_cache_config.tokens_per_block ({block}) with"
                f" enable_chunked_prefill, not {self.max_num_tokens}"
            )
        policy = self.scheduler_config.context_chunking_policy
        if policy is not None and not self.enable_chunked_prefill:
            raise ValueError(
                "scheduler_config.context_chunking_policy requires enable_chunked_prefill"
            )

    @property
    def world_size(self) -> int:
        """Number of GPUs that the engine runs on."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
