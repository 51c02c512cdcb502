"""`LLM`, the class with which callers build an engine and submit requests."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Tokenizer

from tensorrt_llm import fake_control
from tensorrt_llm._torch.pyexecutor.hashed_model import HashedModel
from tensorrt_llm.executor.proxy import GenerationExecutorProxy
from tensorrt_llm.executor.request import GenerationRequest
from tensorrt_llm.executor.result import RequestOutput
from tensorrt_llm.llmapi.llm_configs import CapacitySchedulerPolicy, TorchLlmArgs
from tensorrt_llm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits and features of one engine. `guide_tokenizer`: None if guided decoding is off."""

    model: HashedModel
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    num_blocks: int
    tokens_per_block: int
    may_pause: bool
    is_reusing: bool
    has_lora: bool
    has_stats: bool
    max_draft_len: int
    is_trtllm_sampler: bool
    guide_tokenizer: TokenizerBase | None


def limits_of(
    args: Any, model: HashedModel, tokenizer: TokenizerBase | None, settings: fake_control.Settings
) -> EngineLimits:
    pages, draft = args.kv_cache_config, args.speculative_config
    num_blocks = settings.num_blocks
    if pages.max_tokens is not None:
        num_blocks = min(num_blocks, -(-pages.max_tokens // pages.tokens_per_block))
    policy = args.scheduler_config.capacity_scheduler_policy
    return EngineLimits(
        model=model,
        max_batch_size=args.max_batch_size or 2048,
        max_num_tokens=args.max_num_tokens or 8192,
        max_seq_len=args.max_seq_len or model.max_position_embeddings,
        num_blocks=num_blocks,
        tokens_per_block=pages.tokens_per_block,
        may_pause=policy == CapacitySchedulerPolicy.MAX_UTILIZATION,
        is_reusing=pages.enable_block_reuse,
        has_lora=args.lora_config is not None,
        has_stats=args.enable_iter_perf_stats and settings.has_stats,
        max_draft_len=0 if draft is None else draft.max_draft_len or 1,
        is_trtllm_sampler=args.sampler_type == "TRTLLMSampler",
        guide_tokenizer=tokenizer if args.guided_decoding_backend else None,
    )


class TokenizerBase:
    """A tokenizer of a model's folder; encodes without special tokens."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


class MpiSession:
    """Stands for the session that starts the worker processes."""

    is_ended = False

    def shutdown(self) -> None:
        self.is_ended = True


class LLM:
    """An engine over a model's folder. Building it, `get_stats` and `shutdown` block the calling
    thread; the other calls are made on one event loop.
    """

    _args_class: ClassVar[Any] = TorchLlmArgs

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._executor: GenerationExecutorProxy | None = None
        self.llm_id = "stand-in"
        self.args = self._args_class(
            model=model,
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            **kwargs,
        )
        settings = fake_control.settings_of_new_engine()
        loaded = HashedModel(Path(model))
        self.tokenizer = (
            None if self.args.skip_tokenizer_init else TokenizerBase(Path(tokenizer or model))
        )
        time.sleep(settings.load_s)
        if settings.build_error:
            raise RuntimeError(settings.build_error)
        limits = limits_of(self.args, loaded, self.tokenizer, settings)
        self.mpi_session: MpiSession | None = MpiSession()
        self._executor = GenerationExecutorProxy(limits, settings)
        fake_control.register(fake_control.EngineControl(self._executor.engine, self._executor))

    def generate_async(
        self,
        inputs: str | list[int] | Mapping[str, Any],
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Submit one request and return at once. Changes `sampling_params`, as the real
        one does.
        """
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(sampling_params)}")
        if sampling_params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if not isinstance(inputs, list):
            raise TypeError(f"The inputs must be a list of int, but got {type(inputs)}")
        sampling_params.return_perf_metrics = self.args.return_perf_metrics
        request = GenerationRequest(
            prompt_token_ids=inputs,
            sampling_params=sampling_params,
            streaming=streaming,
            lora_request=lora_request,
            kv_cache_retention_config=kv_cache_retention_config,
            cache_salt=cache_salt,
        )
        return self._executor.submit(request)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Return the statistics since the last call; if there are none yet, block the calling
        thread for up to `timeout` seconds. Only for an engine with the setting `stats="rpc"`, where
        callers fetch the statistics.
        """
        assert self._executor is not None
        assert self._executor.rpc_client is not None, "pushed statistics are read on the loop"
        found: list[dict[str, Any]] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._executor.rpc_client.get(timeout=timeout))
            while True:
                found.append(self._executor.rpc_client.get_nowait())
        return found

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """Return an iterator over pushed statistics, the same object every time. Not a
        coroutine.
        """
        assert self._executor is not None
        assert self._executor.stats is not None, "statistics exist after the first submission"
        self._executor.stats.timeout_s = timeout
        return self._executor.stats

    def shutdown(self) -> None:
        """Stop the engine, and block until it has stopped. A second call does nothing."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        if self.mpi_session is not None:
            self.mpi_session.shutdown()
            self.mpi_session = None

    def _check_health(self) -> bool:
        return self._executor is not None and not self._executor.is_shutdown()
