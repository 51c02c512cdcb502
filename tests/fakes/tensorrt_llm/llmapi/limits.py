"""The limits that an engine was built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorrt_llm._torch.pyexecutor.hashed_model import HashedModel
from tensorrt_llm.executor.errors import RequestError
from tensorrt_llm.fake_control import Settings
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.llmapi.llm_configs import CapacitySchedulerPolicy
from tensorrt_llm.llmapi.tokenizer import TokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits and switches of one engine."""

    model: HashedModel
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    num_blocks: int
    tokens_per_block: int
    policy: CapacitySchedulerPolicy
    is_chunked: bool
    is_reusing: bool
    has_lora: bool
    has_stats: bool
    has_request_stats: bool
    stream_interval: int
    max_draft_len: int
    is_trtllm_sampler: bool
    guide_tokenizer: TokenizerBase | None

    def bias_of(self, bias: Any) -> NDArray[np.float64]:
        """Return `embedding_bias` as an array [vocab]. Raises RequestError for another shape."""
        array = np.asarray(bias.tolist() if hasattr(bias, "tolist") else bias, dtype=np.float64)
        if array.shape != (self.model.vocab_size,):
            raise RequestError(
                f"embedding_bias must have shape ({self.model.vocab_size},), got {array.shape}"
            )
        return array


def limits_of(
    args: TorchLlmArgs, model: HashedModel, tokenizer: TokenizerBase | None, settings: Settings
) -> EngineLimits:
    """Return the limits of an engine with these arguments and this model."""
    pages = args.kv_cache_config
    num_blocks = settings.num_blocks
    if pages.max_tokens is not None:
        num_blocks = min(num_blocks, -(-pages.max_tokens // pages.tokens_per_block))
    draft = args.speculative_config
    return EngineLimits(
        model=model,
        max_batch_size=args.max_batch_size or 2048,
        max_num_tokens=args.max_num_tokens or 8192,
        max_seq_len=args.max_seq_len or model.max_position_embeddings,
        num_blocks=num_blocks,
        tokens_per_block=pages.tokens_per_block,
        policy=args.scheduler_config.capacity_scheduler_policy,
        is_chunked=args.enable_chunked_prefill,
        is_reusing=pages.enable_block_reuse,
        has_lora=args.enable_lora or args.lora_config is not None,
        has_stats=args.enable_iter_perf_stats,
        has_request_stats=args.enable_iter_req_stats,
        stream_interval=args.stream_interval,
        max_draft_len=0 if draft is None else draft.max_draft_len or 1,
        is_trtllm_sampler=args.sampler_type == "TRTLLMSampler",
        guide_tokenizer=tokenizer if args.guided_decoding_backend else None,
    )
