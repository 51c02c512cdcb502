"""The settings of the TensorRT-LLM executor, with TensorRT-LLM's names.

Defines the fields, their ranges and their dependencies. `preflight` checks them against the model
folder, `llm_args` against the installed version. Imports no large packages, because every process
of the service reads the settings.
"""

import enum
from dataclasses import dataclass, field
from pathlib import Path

from penstock.executor import limit_texts
from penstock.scheduler.setting import SettingError, check, required, setting

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "nvfp4")
_MAX_COUNT = 65_536
"""Upper bound of counts such as requests, GPUs and LoRA ranks; a larger number is rejected as a
mistake.
"""
MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1
_MAX_WAIT_S = 1e9
"""Upper bound of a time limit, seconds: some 30 years. 64-bit clocks overflow at ten times this."""


class CapacityPolicy(enum.StrEnum):
    """Which requests the engine runs when KV cache blocks are scarce. The values are members of the
    engine's CapacitySchedulerPolicy.

    The engine's third policy, STATIC_BATCH, is not offered: it waits until a whole batch has ended.
    """

    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    MAX_UTILIZATION = "MAX_UTILIZATION"


class ChunkingPolicy(enum.StrEnum):
    """How a step's token budget is divided among prompts. The values are members of the engine's
    ContextChunkingPolicy.
    """

    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"


class SamplerType(enum.StrEnum):
    """The engine's samplers. AUTO selects TORCH."""

    AUTO = "auto"
    TORCH = "TorchSampler"
    TRTLLM = "TRTLLMSampler"


class SamplerOption(enum.StrEnum):
    """Sampling options that a sampler may silently ignore, depending on the version."""

    PENALTIES = "penalties"
    SEED = "seed"
    MIN_TOKENS = "min_tokens"
    MIN_P = "min_p"


class GuidedDecodingBackend(enum.StrEnum):
    """The library that compiles schemas, patterns and grammars to token masks."""

    XGRAMMAR = "xgrammar"
    LLGUIDANCE = "llguidance"


class DecodingType(enum.StrEnum):
    """The kinds of speculative decoding that can be configured; the PyTorch backend has more."""

    NGRAM = "NGram"
    EAGLE = "Eagle"
    MTP = "MTP"
    DRAFT_TARGET = "DraftTarget"
    AUTO = "AUTO"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheSettings:
    """Settings of the engine's KV cache: its size, its number format and the reuse of blocks.
    Raises ValueError naming the invalid field.
    """

    free_gpu_memory_fraction: float = setting(
        0.9,
        text="KV cache's share of the GPU memory that is free after loading the weights",
        above=0,
        at_most=1,
    )
    max_tokens: int | None = setting(
        None,
        text="maximum tokens in the KV cache, at least one block",
        at_least=1,
        at_most=_MAX_INT64,
        shown="limited only by free_gpu_memory_fraction",
    )
    tokens_per_block: int = setting(
        32, text=limit_texts.BLOCK_SIZE + ", a power of 2", at_least=1, at_most=_MAX_COUNT
    )
    enable_block_reuse: bool = setting(
        True, text="whether equal prefixes share blocks; --prefix-caching must agree"
    )
    enable_partial_reuse: bool = setting(
        True,
        text="whether a request may reuse the matching first tokens of a block whose other tokens"
        " differ",
    )
    host_cache_size: int | None = setting(
        None,
        text="bytes of host memory for blocks evicted from the GPU",
        at_least=0,
        at_most=_MAX_INT64,
        shown="the engine's",
    )
    dtype: str = setting(
        "auto",
        text="number format of the KV cache; auto: the format that the checkpoint specifies for the"
        " cache, else the model's",
        choices=KV_CACHE_DTYPES,
    )

    def __post_init__(self) -> None:
        check(self)
        block = self.tokens_per_block
        if block & (block - 1):
            raise SettingError(f"{{}} must be a power of 2, not {block}", "tokens_per_block")
        if self.max_tokens is not None and self.max_tokens < block:
            raise SettingError(f"{{}} must be at least one block of {block} tokens", "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """How the engine's scheduler selects requests, and divides a step's tokens among prompts."""

    capacity_scheduler_policy: CapacityPolicy = setting(
        CapacityPolicy.GUARANTEED_NO_EVICT,
        text="which requests run when KV cache blocks are scarce; penstock's scheduler admits by it"
        " too. MAX_UTILIZATION does not work with a guided_decoding_backend",
    )
    context_chunking_policy: ChunkingPolicy | None = setting(
        None,
        text="how a step's token budget is divided among prompts; requires enable_chunked_prefill",
        shown="the engine's",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphSettings:
    """Settings of CUDA graphs; the engine uses them for steps without prefill. Raises ValueError
    naming the field, if one is invalid.
    """

    enabled: bool = setting(True, text="whether steps without prefill use CUDA graphs")
    batch_sizes: tuple[int, ...] = setting(
        (),
        text=f"batch sizes of the captured graphs, each in 1..{_MAX_COUNT} and at most the engine's"
        " max_batch_size",
        shown="the engine's, up to cuda_graph_config.max_batch_size",
    )
    max_batch_size: int | None = setting(
        None,
        text="largest batch size of a captured graph, at most the engine's max_batch_size",
        at_least=1,
        at_most=_MAX_COUNT,
        shown="the engine's",
    )
    enable_padding: bool = setting(
        False, text="whether a batch of another size is padded to the next larger captured size"
    )

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
class AdapterConfig:
    """One LoRA adapter. Raises ValueError naming the invalid field."""

    name: str = required(
        text="name of a LoRA adapter in requests, one for each; without adapters, LoRA is disabled"
    )
    path: Path = required(text="its folder, with adapter_config.json", metavar="FOLDER")
    id: int = required(text="its id in the engine, one for each", at_least=1, at_most=MAX_INT32)

    def __post_init__(self) -> None:
        check(self)
        if not self.name:
            raise SettingError("{} must not be empty", "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The LoRA adapters, and the limits on their rank, on the layers that they change and on their
    number in memory. Raises ValueError naming the invalid field.
    """

    adapters: tuple[AdapterConfig, ...] = ()
    max_lora_rank: int = setting(
        64, text="largest rank of the adapters", at_least=1, at_most=_MAX_COUNT
    )
    max_loras: int | None = setting(
        None,
        text="how many adapters the GPU holds at the same time",
        at_least=1,
        at_most=_MAX_COUNT,
        shown="all",
    )
    max_cpu_loras: int | None = setting(
        None,
        text="how many adapters the host memory holds",
        at_least=1,
        at_most=_MAX_COUNT,
        shown="all",
    )
    lora_target_modules: tuple[str, ...] = setting(
        (),
        text="layers that adapters may change, by the engine's names (attn_q, ...)",
        shown="those that the first adapter changes",
    )

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
"""For each setting, the decoding types that it applies to."""
_NEEDED_DRAFT_SETTINGS = ("max_draft_len", "speculative_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSettings:
    """Settings of speculative decoding: its kind, what drafts the tokens, and how many at a time.
    Raises ValueError naming the invalid field.
    """

    decoding_type: DecodingType = required(
        text="kind of speculative decoding; without speculative_config, there is none"
    )
    max_draft_len: int | None = setting(
        None,
        text="maximum number of tokens drafted per step; must be given for NGram, Eagle and"
        " DraftTarget. AUTO chooses it, MTP uses num_nextn_predict_layers",
        at_least=1,
        at_most=_MAX_COUNT,
        shown="none",
    )
    speculative_model: Path | None = setting(
        None,
        text="folder of the draft model; must be given for Eagle and DraftTarget",
        metavar="FOLDER",
        shown="none",
    )
    max_matching_ngram_size: int | None = setting(
        None,
        text="longest n-gram of NGram",
        at_least=1,
        at_most=_MAX_COUNT,
        shown="2, as in TensorRT-LLM releases after 1.2",
    )
    num_nextn_predict_layers: int | None = setting(
        None,
        text="draft layers of MTP",
        at_least=1,
        at_most=_MAX_COUNT,
        shown="the engine's",
    )
    eagle3_one_model: bool = setting(
        True, text="whether Eagle's draft model runs inside the target model"
    )

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
    """Limits for monitoring the engine; times in seconds."""

    response_timeout_s: float = setting(
        120.0,
        text="seconds without a response after which an engine with requests is considered dead; if"
        " only one request gets no response for this time, that request fails",
        above=0,
        at_most=_MAX_WAIT_S,
    )
    abort_timeout_s: float = setting(
        10.0,
        text="maximum wait for the last response of an aborted request, seconds; it never arrives"
        " if the request was still in the engine's queue",
        above=0,
        at_most=_MAX_WAIT_S,
    )
    load_timeout_s: float = setting(
        1800.0,
        text="time limit for creating the engine, which includes loading the model, seconds",
        above=0,
        at_most=_MAX_WAIT_S,
    )
    limits_timeout_s: float = setting(
        120.0,
        text="maximum wait, once the engine is created, for the statistics with its limits, and"
        " then for the test of each adapter, seconds",
        above=0,
        at_most=_MAX_WAIT_S,
    )
    shutdown_timeout_s: float = setting(
        30.0,
        text="time limit for the engine's shutdown call, seconds",
        above=0,
        at_most=_MAX_WAIT_S,
    )
    max_failures_in_row: int = setting(
        16,
        text="number of requests that fail for reasons other than an invalid request, without a"
        " token of any request in between, after which the engine is considered dead and restarts",
        at_least=1,
        at_most=_MAX_COUNT,
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmConfig:
    """The settings of a TensorRT-LLM engine. Raises ValueError naming the invalid field."""

    max_batch_size: int = setting(
        256, text=limit_texts.MAX_NUM_SEQS, at_least=1, at_most=_MAX_COUNT
    )
    max_num_tokens: int = setting(
        8192,
        text="maximum tokens of one step, at least max_batch_size and, with"
        " enable_chunked_prefill, one KV cache block",
        at_least=1,
        at_most=MAX_INT32,
    )
    max_seq_len: int | None = setting(
        None,
        text=limit_texts.MAX_SEQ_LEN,
        at_least=2,
        at_most=MAX_INT32,
        shown="the model's",
    )
    tensor_parallel_size: int = setting(
        1,
        text="GPUs that share each layer; the engine runs on pipeline_parallel_size times as many",
        at_least=1,
        at_most=_MAX_COUNT,
    )
    pipeline_parallel_size: int = setting(
        1,
        text="parts of consecutive layers, each on tensor_parallel_size GPUs",
        at_least=1,
        at_most=_MAX_COUNT,
    )
    dtype: str = setting("auto", text="number format of the model", choices=DTYPES)
    trust_remote_code: bool = setting(False, text="whether Python code in the model folder may run")
    enable_chunked_prefill: bool = setting(
        True,
        text="whether a prompt may be computed over several steps (in the engine, off by default)."
        " Without it, a prompt longer than max_num_tokens is rejected, and a long prompt delays all"
        " outputs by its whole prefill",
    )
    disable_overlap_scheduler: bool = setting(
        False, text="whether only one step at a time is in flight"
    )
    attn_backend: str = setting("TRTLLM", text="attention kernels, by the engine's names")
    sampler_type: SamplerType = setting(
        SamplerType.AUTO,
        text="the engine's sampler; auto selects TorchSampler. docs/tensorrt-llm-mapping.md has the"
        " options that each ignores",
    )
    sampler_honours: tuple[SamplerOption, ...] = setting(
        (),
        text="sampling options that the operator declares to work in the installed version,"
        " although penstock does not detect their support. Options that a sampler may ignore, and"
        " that are neither detected nor declared, are rejected",
        shown="none",
    )
    guided_decoding_backend: GuidedDecodingBackend | None = setting(
        None,
        text="library that compiles schemas, patterns and grammars to token masks; without one,"
        " requests for structured output are rejected",
        shown="none",
    )
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
        """Raise ValueError if settings contradict each other."""
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
