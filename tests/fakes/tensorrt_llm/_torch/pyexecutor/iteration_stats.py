"""Statistics of one iteration, under the documented keys."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest
from tensorrt_llm._torch.pyexecutor.scheduler import Scheduled

if TYPE_CHECKING:
    from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor


def iteration_stats(
    engine: PyExecutor, step: Scheduled, *, latency_ms: float, num_new: int, num_completed: int
) -> dict[str, Any]:
    """Return statistics as in the engine's JSON. `numQueuedRequests` is 0 even while
    requests wait."""
    limits = engine.limits
    stats: dict[str, Any] = {
        "timestamp": datetime.now(UTC).strftime("%m-%d-%Y %H:%M:%S.%f"),
        "iter": engine.iteration + 1,
        "iterLatencyMS": latency_ms,
        "newActiveRequestsQueueLatencyMS": 0.0,
        "numNewActiveRequests": num_new,
        "numActiveRequests": len(engine.active),
        "numQueuedRequests": 0,
        "numCompletedRequests": num_completed,
        "maxNumActiveRequests": limits.max_batch_size,
        "maxBatchSizeStatic": 0,
        "maxBatchSizeTunerRecommended": 0,
        "maxBatchSizeRuntime": 0,
        "maxNumTokensStatic": 0,
        "maxNumTokensTunerRecommended": 0,
        "maxNumTokensRuntime": 0,
        "gpuMemUsage": 0,
        "cpuMemUsage": 0,
        "pinnedMemUsage": 0,
        "kvCacheStats": _kv_cache_stats(engine),
        "crossKvCacheStats": None,
        "staticBatchingStats": None,
        "inflightBatchingStats": {
            "numScheduledRequests": len(step.context) + len(step.generation),
            "numContextRequests": len(step.context),
            "numGenRequests": len(step.generation),
            "numPausedRequests": step.num_paused,
            "numCtxTokens": step.num_context_tokens,
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": 0.0,
        },
        "specDecodingStats": _spec_decoding_stats(step) if limits.max_draft_len else None,
    }
    if limits.has_request_stats:
        stats["requestStats"] = [
            *(_request_stats(request, "QUEUED") for request in engine.waiting.values()),
            *(_request_stats(request, _stage(request)) for request in engine.active.values()),
        ]
    return stats


def _kv_cache_stats(engine: PyExecutor) -> dict[str, Any]:
    pool = engine.pool
    seen = pool.num_reused + pool.num_missed
    return {
        "maxNumBlocks": pool.num_blocks,
        "freeNumBlocks": pool.num_free + engine.settings.free_blocks_drift,
        "usedNumBlocks": pool.num_used - engine.settings.free_blocks_drift,
        "tokensPerBlock": pool.tokens_per_block,
        "allocTotalBlocks": pool.num_allocated,
        "allocNewBlocks": pool.num_new,
        "reusedBlocks": pool.num_reused,
        "missedBlocks": pool.num_missed,
        "cacheHitRate": pool.num_reused / seen if seen else 0.0,
    }


def _spec_decoding_stats(step: Scheduled) -> dict[str, Any]:
    num_tokens = sum(count for _, count in step.generation)
    num_requests = len(step.generation)
    return {
        "numDraftTokens": num_tokens,
        "numAcceptedTokens": num_tokens - num_requests,
        "numRequestsWithDraftTokens": num_requests,
        "acceptanceLength": num_tokens / num_requests if num_requests else 0.0,
        "iterLatencyMS": 0.0,
        "draftOverhead": 0.0,
    }


def _stage(request: LlmRequest) -> str:
    return "GENERATION_IN_PROGRESS" if request.generated else "CONTEXT_IN_PROGRESS"


def _request_stats(request: LlmRequest, stage: str) -> dict[str, Any]:
    return {
        "id": request.client_id,
        "stage": stage,
        "contextPrefillPosition": request.num_computed,
        "numGeneratedTokens": len(request.generated),
        "avgNumDecodedTokensPerIter": 1.0,
        "scheduled": bool(request.blocks),
        "paused": bool(request.generated) and not request.blocks,
        "disServingStats": None,
        "allocTotalBlocksPerRequest": len(request.blocks),
        "allocNewBlocksPerRequest": len(request.blocks),
        "reusedBlocksPerRequest": 0,
        "missedBlocksPerRequest": 0,
        "kvCacheHitRatePerRequest": 0.0,
    }
