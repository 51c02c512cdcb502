"""`LLM` of a later version, for tests of signature lookups. Not in the real package.

Replace `tensorrt_llm.LLM` with it before the package is inspected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorrt_llm.executor.request import GenerationRequest, LoRARequest
from tensorrt_llm.executor.result import RequestOutput
from tensorrt_llm.llmapi import llm
from tensorrt_llm.llmapi.kv_cache_retention import KvCacheRetentionConfig
from tensorrt_llm.sampling_params import SamplingParams


class LLM(llm.LLM):
    """Takes a priority and records it with the request, without effect on the order."""

    def generate_async(
        self,
        inputs: str | list[int] | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        disaggregated_params: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
        conversation_params: Any = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        """Submit a request; `priority` is 0 to 1."""
        if not 0.0 <= priority <= 1.0:
            raise ValueError(f"priority must be in [0, 1], got {priority}")
        request = GenerationRequest(
            prompt_token_ids=[],
            sampling_params=sampling_params,
            streaming=streaming,
            lora_request=lora_request,
            kv_cache_retention_config=kv_cache_retention_config,
            trace_headers=trace_headers,
            cache_salt=cache_salt,
            priority=priority,
        )
        return self._submit(inputs, request)
