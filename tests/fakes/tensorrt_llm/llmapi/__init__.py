"""The public names of the package, in the module where the real one has them."""

from tensorrt_llm.executor.errors import RequestError
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.result import CompletionOutput, RequestOutput
from tensorrt_llm.llmapi.kv_cache_retention import KvCacheRetentionConfig
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs, TrtLlmArgs
from tensorrt_llm.llmapi.llm_configs import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    CudaGraphConfig,
    DynamicBatchConfig,
    KvCacheConfig,
    MoeConfig,
    SchedulerConfig,
)
from tensorrt_llm.llmapi.speculative import (
    AutoDecodingConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SaveHiddenStatesDecodingConfig,
    UserProvidedDecodingConfig,
)
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

__all__ = [
    "AutoDecodingConfig",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "CudaGraphConfig",
    "DraftTargetDecodingConfig",
    "DynamicBatchConfig",
    "EagleDecodingConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "KvCacheRetentionConfig",
    "LoRARequest",
    "LookaheadDecodingConfig",
    "MTPDecodingConfig",
    "MedusaDecodingConfig",
    "MoeConfig",
    "NGramDecodingConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SaveHiddenStatesDecodingConfig",
    "SchedulerConfig",
    "TorchLlmArgs",
    "TrtLlmArgs",
    "UserProvidedDecodingConfig",
]
