"""Reads the engine's limits.

Sends warm-up requests, because the engine reports its limits only with the statistics of an
iteration, and converts the limits to `ExecutorInfo`. Also tests LoRA adapters.
"""

import asyncio
from collections.abc import Callable

import numpy as np

from penstock.executor.trtllm.api import Llm
from penstock.executor.trtllm.config import TrtllmConfig
from penstock.executor.trtllm.model_kind import ModelFolder
from penstock.executor.trtllm.package import Package
from penstock.executor.trtllm.request_mapping import RequestMapping
from penstock.executor.trtllm.samplers import offered_features
from penstock.executor.trtllm.stats import EngineStats
from penstock.scheduler.executor import ExecutorDied, ExecutorInfo
from penstock.scheduler.request import RequestSpec, SamplingParams

_STATS_TIMEOUT_S = 5.0
"""Seconds without statistics after which another request is sent: once the engine's iterator of
statistics has ended, it yields again only after a new request.
"""


async def probe_limits(
    llm: Llm,
    mapping: RequestMapping,
    first_stats: "asyncio.Future[EngineStats]",
    on_submit: Callable[[], None],
    timeout_s: float,
) -> EngineStats:
    """Send requests for a single output token, one after another, until `first_stats` has a result;
    return this result. `on_submit` is called before each request.

    Raises ExecutorDied if the engine reports no statistics, or does not respond, within
    `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not first_stats.done():
                on_submit()
                async for _ in llm.generate_async(**_warm_up(mapping)):
                    pass
                await asyncio.wait([first_stats], timeout=_STATS_TIMEOUT_S)
            return first_stats.result()
    except TimeoutError:
        raise ExecutorDied(
            f"the engine reported no limits within {timeout_s:g} s: it is"
            " unresponsive, or this version reports no KV cache statistics"
        ) from None


async def try_adapter(llm: Llm, mapping: RequestMapping, name: str, timeout_s: float) -> None:
    """Generate one token with the LoRA adapter `name`, to test the adapter.

    The engine loads adapters outside of a request's error handling, so the first request with a
    broken adapter would end the engine. Raises ExecutorDied naming the adapter if the request fails
    or takes longer than `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            async for _ in llm.generate_async(**_warm_up(mapping, name)):
                pass
    except TimeoutError:
        reason = f"the engine returned no response within {timeout_s:g} s"
    except Exception as error:
        raise ExecutorDied(f"lora_config.adapters: {name!r} cannot be used: {error}") from error
    else:
        return
    raise ExecutorDied(f"lora_config.adapters: {name!r} cannot be used: {reason}")


def num_blocks_ahead(config: TrtllmConfig, tokens_per_block: int) -> int:
    """Return how many KV cache blocks a running request may hold in advance, for its next token and
    its draft tokens.
    """
    return -(-(1 + _num_draft_tokens(config)) // tokens_per_block)


def engine_info(
    config: TrtllmConfig, folder: ModelFolder, package: Package, stats: EngineStats
) -> ExecutorInfo:
    """Return the effective limits of the engine.

    `max_num_seqs` is the minimum of the setting (`max_batch_size`) and of the limits that the
    engine and the model folder report. `num_blocks` is the number that the engine reports, less the
    blocks that draft tokens need. `max_seq_len` is the setting or, without it, the value of the
    model folder. Raises ValueError if neither gives it.
    """
    max_seq_len = config.max_seq_len or folder.max_seq_len
    if max_seq_len is None:
        raise ValueError(f"max_seq_len must be given: {folder.path} has none")
    assert folder.vocab_size is not None
    reported = (folder.max_batch_size, stats.max_num_active)
    max_num_seqs = min(config.max_batch_size, *(limit for limit in reported if limit))
    block_size = stats.tokens_per_block
    # Draft tokens are written before they are accepted, beyond the length that admission assumed.
    num_draft_blocks = -(-_num_draft_tokens(config) // block_size) * max_num_seqs
    return ExecutorInfo(
        name="trtllm",
        vocab_size=folder.vocab_size,
        block_size=block_size,
        num_blocks=max(1, stats.max_num_blocks - num_draft_blocks),
        max_seq_len=max_seq_len,
        max_num_seqs=max_num_seqs,
        features=offered_features(config, package),
        max_prompt_tokens=None if config.enable_chunked_prefill else config.max_num_tokens,
        adapters=tuple(adapter.name for adapter in config.lora_config.adapters),
        is_self_paced=True,
    )


def _num_draft_tokens(config: TrtllmConfig) -> int:
    speculative = config.speculative_config
    if speculative is None:
        return 0
    return speculative.max_draft_len or speculative.num_nextn_predict_layers or 0


def _warm_up(mapping: RequestMapping, adapter: str = "") -> dict[str, object]:
    """Return arguments of `generate_async` for a greedy request with one prompt token and one
    output token.

    The request has no `hash_salt`, so its cache salt is unique and it shares no cached blocks.
    """
    spec = RequestSpec(
        key=1,
        request_id="warm-up",
        prompt_ids=np.zeros(1, dtype=np.int32),
        max_tokens=1,
        sampling=SamplingParams(temperature=0.0),
        adapter=adapter,
    )
    return mapping.arguments(spec, spec.prompt_ids)
