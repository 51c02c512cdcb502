"""The settings of the TensorRT-LLM executor, under the names its users know.

Owns the fields, their ranges and how they bound each other. Knows neither the model folder
(`preflight` holds the two against each other) nor the installed version (`llm_args` does). Imports
nothing heavy: the server reads these in every process.
"""

import enum
import math
from dataclasses import dataclass, field, fields
from pathlib import Path

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "nvfp4")
_MAX_COUNT = 65_536
"""Of requests, GPUs, adapters and the like: above it is a slip of the finger, not a machine."""
_MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1
_MAX_WAIT_S = 1e9
"""Thirty years; ten times as long, and clocks of 64 bits overflow."""


class CapacityPolicy(enum.StrEnum):
    """When a request may run; by the name, the engine's CapacitySchedulerPolicy.

    Its third, STATIC_BATCH, is missing: it waits until a whole batch has ended.
    """

    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    MAX_UTILIZATION = "MAX_UTILIZATION"


class ChunkingPolicy(enum.StrEnum):
    """Whose prompt gets the tokens of a step; by the name, the engine's ContextChunkingPolicy."""

    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"


class SamplerType(enum.StrEnum):
    """Which of the engine's samplers draws the tokens; AUTO is TORCH."""

    AUTO = "auto"
    TORCH = "TorchSampler"
    TRTLLM = "TRTLLMSampler"


class SamplerPromise(enum.StrEnum):
    """What a sampler may ignore without a word, depending on its version."""

    PENALTIES = "penalties"
    SEED = "seed"
    MIN_TOKENS = "min_tokens"
    MIN_P = "min_p"


class GuidedDecodingBackend(enum.StrEnum):
    """Who turns a schema, a pattern or a grammar into masks."""

    XGRAMMAR = "xgrammar"
    LLGUIDANCE = "llguidance"


class DecodingType(enum.StrEnum):
    """The kinds of speculative decoding that the PyTorch backend has."""

    NGRAM = "NGram"
    EAGLE = "Eagle"
    MTP = "MTP"
    DRAFT_TARGET = "DraftTarget"
    AUTO = "AUTO"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheSettings:
    """The engine's KV cache. Raises ValueError naming the field.

    `free_gpu_memory_fraction`: its share of the GPU memory that the weights leave free.
    `max_tokens`: at most so many tokens, None for what the share holds. `enable_block_reuse`:
    equal prefixes share blocks; `enable_partial_reuse`: a block may be shared in part.
    `host_cache_size`: bytes of host memory for blocks that the GPU gave up. `dtype`: "auto" follows
    the model or, where it is quantised with its cache, the checkpoint.
    """

    free_gpu_memory_fraction: float = 0.9
    max_tokens: int | None = None
    tokens_per_block: int = 32
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    host_cache_size: int | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if not 0.0 < self.free_gpu_memory_fraction <= 1.0:
            raise ValueError(
                "free_gpu_memory_fraction must be above 0 and at most 1,"
                f" not {self.free_gpu_memory_fraction}"
            )
        _within("max_tokens", self.max_tokens, 1, _MAX_INT64)
        if self.tokens_per_block < 1 or self.tokens_per_block & (self.tokens_per_block - 1):
            raise ValueError(f"tokens_per_block must be a power of 2, not {self.tokens_per_block}")
        _within("tokens_per_block", self.tokens_per_block, 1, _MAX_COUNT)
        if self.max_tokens is not None and self.max_tokens < self.tokens_per_block:
            raise ValueError(f"max_tokens must hold one block of {self.tokens_per_block} tokens")
        _within("host_cache_size", self.host_cache_size, 0, _MAX_INT64)
        _one_of("dtype", self.dtype, KV_CACHE_DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """The engine's own scheduler. `context_chunking_policy` None: the engine's choice."""

    capacity_scheduler_policy: CapacityPolicy = CapacityPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ChunkingPolicy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphSettings:
    """CUDA graphs of steps without prompts. Raises ValueError naming the field.

    `batch_sizes`: of which a graph is recorded, empty for the engine's own choice, up to
    `max_batch_size` where that is given. `enable_padding`: other sizes use the next larger graph.
    """

    enabled: bool = True
    batch_sizes: tuple[int, ...] = ()
    max_batch_size: int | None = None
    enable_padding: bool = False

    def __post_init__(self) -> None:
        for size in self.batch_sizes:
            _within("batch_sizes", size, 1, _MAX_COUNT)
        _within("max_batch_size", self.max_batch_size, 1, _MAX_COUNT)
        if self.batch_sizes and self.max_batch_size not in (None, max(self.batch_sizes)):
            raise ValueError(
                f"max_batch_size must be the largest of batch_sizes, {max(self.batch_sizes)},"
                f" not {self.max_batch_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One LoRA: the name that requests use, its folder, and its number inside the engine."""

    name: str
    path: Path
    id: int

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty")
        _within("id", self.id, 1, _MAX_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters; none, and the engine runs without. Raises ValueError naming the field.

    `max_loras`: how many the GPU holds at once, None for all. `max_cpu_loras`: how many the host
    memory holds, None likewise. `lora_target_modules`: which layers may be adapted, in the engine's
    names; empty: those of the first adapter.
    """

    adapters: tuple[Adapter, ...] = ()
    max_lora_rank: int = 64
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    lora_target_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("name", "id"):
            values = [getattr(adapter, name) for adapter in self.adapters]
            if len(set(values)) < len(values):
                raise ValueError(f"adapters must differ in {name}")
        _within("max_lora_rank", self.max_lora_rank, 1, _MAX_COUNT)
        _within("max_loras", self.max_loras, 1, _MAX_COUNT)
        _within("max_cpu_loras", self.max_cpu_loras, 1, _MAX_COUNT)


_DRAFT_SETTINGS = {
    "max_draft_len": (DecodingType.NGRAM, DecodingType.EAGLE, DecodingType.DRAFT_TARGET),
    "speculative_model": (DecodingType.EAGLE, DecodingType.DRAFT_TARGET),
    "max_matching_ngram_size": (DecodingType.NGRAM,),
    "num_nextn_predict_layers": (DecodingType.MTP,),
}
"""Which kinds take a setting."""
_NEEDED_DRAFT_SETTINGS = ("max_draft_len", "speculative_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSettings:
    """Tokens that are guessed and then checked. Raises ValueError naming the field.

    `max_draft_len`: tokens guessed at once; AUTO chooses by itself, MTP takes
    `num_nextn_predict_layers` instead. `speculative_model`: the folder of the guessing model
    (Eagle, DraftTarget). `max_matching_ngram_size`: the most tokens that NGram looks for, None for
    its default. `eagle3_one_model`: whether Eagle's model runs inside the target model.
    """

    decoding_type: DecodingType
    max_draft_len: int | None = None
    speculative_model: Path | None = None
    max_matching_ngram_size: int | None = None
    num_nextn_predict_layers: int | None = None
    eagle3_one_model: bool = True

    def __post_init__(self) -> None:
        kind = self.decoding_type
        for name, takers in _DRAFT_SETTINGS.items():
            value = getattr(self, name)
            if value is not None and kind not in takers:
                raise ValueError(f"{name} means nothing to decoding_type {kind}")
            if value is None and kind in takers and name in _NEEDED_DRAFT_SETTINGS:
                raise ValueError(f"{name} must be given with decoding_type {kind}")
            if isinstance(value, int):
                _within(name, value, 1, _MAX_COUNT)
        if not self.eagle3_one_model and kind is not DecodingType.EAGLE:
            raise ValueError(f"eagle3_one_model means nothing to decoding_type {kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """How long the adapter waits for the engine, seconds; no wait is without end.

    `response_timeout_s`: the engine owes words and says none: it is dead; it speaks of others and
    never of one: that one fails. `abort_grace_s`: for the last word on an aborted request, which
    one that still waits never gets. `load_timeout_s`: for building the engine. `limits_timeout_s`:
    after that, for the statistics that tell the engine's limits. `shutdown_timeout_s`: for the
    engine's own shutdown. `max_failures_in_row` counts requests: so many that fail one after
    another, by no fault of their own, mean that the engine is sick and must be started anew.
    """

    response_timeout_s: float = 120.0
    abort_grace_s: float = 10.0
    load_timeout_s: float = 1800.0
    limits_timeout_s: float = 120.0
    shutdown_timeout_s: float = 30.0
    max_failures_in_row: int = 16

    def __post_init__(self) -> None:
        _within("max_failures_in_row", self.max_failures_in_row, 1, _MAX_COUNT)
        for item in fields(self):
            value = getattr(self, item.name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{item.name} must be above 0 and finite, not {value}")
            if value > _MAX_WAIT_S:
                raise ValueError(f"{item.name} must be at most {_MAX_WAIT_S:g}, not {value:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmConfig:
    """What a TensorRT-LLM engine is built from. Raises ValueError naming the field.

    `max_batch_size`: requests that run at once. `max_num_tokens`: tokens of one step.
    `max_seq_len`: prompt and output, None for the model's own. `enable_chunked_prefill` is on,
    unlike the engine's own default: without it a prompt above `max_num_tokens` is refused, and a
    long prompt stops everyone's output for its whole length. `sampler_honours`: what the
    operator vouches for where the installed version is newer than this code's knowledge of its
    samplers; everything else that a sampler may ignore is refused. `guided_decoding_backend` None:
    requests cannot ask for a form.
    """

    max_batch_size: int = 256
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: str = "auto"
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
        _within("max_batch_size", self.max_batch_size, 1, _MAX_COUNT)
        _within("max_num_tokens", self.max_num_tokens, 1, _MAX_INT32)
        _within("max_seq_len", self.max_seq_len, 2, _MAX_INT32)
        _within("tensor_parallel_size", self.tensor_parallel_size, 1, _MAX_COUNT)
        _within("pipeline_parallel_size", self.pipeline_parallel_size, 1, _MAX_COUNT)
        _one_of("dtype", self.dtype, DTYPES)
        if not self.attn_backend:
            raise ValueError("attn_backend must not be empty")
        if len(set(self.sampler_honours)) < len(self.sampler_honours):
            raise ValueError("sampler_honours must not name a thing twice")
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_tokens must be at least max_batch_size ({self.max_batch_size}),"
                f" not {self.max_num_tokens}"
            )
        self._check_parts()

    def _check_parts(self) -> None:
        """What one part asks of another."""
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
            # The engine pauses requests, and begins a form from its start when one goes on (NVIDIA
            # issue #18891).
            raise ValueError(
                f"scheduler_config.capacity_scheduler_policy {capacity} does not work with"
                " guided_decoding_backend: a paused output would break its constraint"
            )
        block = self.kv_cache_config.tokens_per_block
        if self.enable_chunked_prefill and self.max_num_tokens < block:
            # Prompts are cut at blocks.
            raise ValueError(
                f"max_num_tokens must be at least kv_cache_config.tokens_per_block ({block}) with"
                f" enable_chunked_prefill, not {self.max_num_tokens}"
            )
        policy = self.scheduler_config.context_chunking_policy
        if policy is not None and not self.enable_chunked_prefill:
            raise ValueError(
                "scheduler_config.context_chunking_policy means nothing without"
                " enable_chunked_prefill"
            )

    @property
    def world_size(self) -> int:
        """GPUs that the engine runs on."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def _within(name: str, value: int | None, lowest: int, highest: int) -> None:
    if value is not None and value < lowest:
        raise ValueError(f"{name} must be at least {lowest}, not {_shortened(value)}")
    if value is not None and value > highest:
        raise ValueError(f"{name} must be at most {highest}, not {_shortened(value)}")


def _shortened(value: int) -> str:
    return str(value) if abs(value) <= _MAX_INT64 else "an integer of more than 64 bits"


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
