"""`LLM`: the entry point of the package."""

from __future__ import annotations

import atexit
import os
import socket
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from tensorrt_llm import fake_control
from tensorrt_llm._torch.pyexecutor.hashed_model import HashedModel
from tensorrt_llm.executor.errors import RequestError
from tensorrt_llm.executor.proxy import GenerationExecutorProxy, empty_async_iterable
from tensorrt_llm.executor.request import GenerationRequest, LoRARequest
from tensorrt_llm.executor.result import RequestOutput
from tensorrt_llm.llmapi.kv_cache_retention import KvCacheRetentionConfig
from tensorrt_llm.llmapi.limits import limits_of
from tensorrt_llm.llmapi.llm_args import TRT_ONLY_KEYS, TorchLlmArgs
from tensorrt_llm.llmapi.tokenizer import TokenizerBase
from tensorrt_llm.sampling_params import SamplingParams


class MpiSession:
    """The session that would have started the worker processes."""

    is_ended = False

    def shutdown(self) -> None:
        self.is_ended = True


class LLM:
    """An engine over a model's folder. Building takes long; all other calls belong to one loop."""

    _args_class: ClassVar[type[TorchLlmArgs]] = TorchLlmArgs
    _foreign_keys: ClassVar[frozenset[str]] = TRT_ONLY_KEYS

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
        self.mpi_session: MpiSession | None = None
        trt_only = sorted(self._foreign_keys & set(kwargs))
        if trt_only:
            raise ValueError(f"These arguments are only for the TensorRT backend: {trt_only}")
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
        if self.args.world_size > settings.num_gpus:
            raise RuntimeError(
                f"world_size ({self.args.world_size}) is greater than the number of visible GPUs "
                f"({settings.num_gpus})"
            )
        os.environ.update(self.args.env_overrides or {})
        self.llm_id = f"{socket.gethostname()}-{os.getpid()}-{int(time.time() * 1000)}"
        loaded = HashedModel(Path(model))
        self.tokenizer = self._load_tokenizer(Path(model), loaded.eos_token_id)
        if self.args.guided_decoding_backend and self.tokenizer is None:
            raise ValueError("Tokenizer is required for guided decoding")
        if self.args.speculative_config is not None:
            self.args.speculative_config.validate()
        if settings.load_s > 0.0:
            time.sleep(settings.load_s)
        if settings.build_error:
            raise RuntimeError(settings.build_error)
        limits = limits_of(self.args, loaded, self.tokenizer, settings)
        self.mpi_session = MpiSession()
        self._executor = GenerationExecutorProxy(limits, settings, self.tokenizer)
        fake_control.register(fake_control.EngineControl(self._executor.engine, self._executor))
        atexit.register(_shutdown_if_alive, weakref.ref(self))

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
    ) -> RequestOutput:
        """Submit one request and return at once; changes `sampling_params`."""
        request = GenerationRequest(
            prompt_token_ids=[],
            sampling_params=sampling_params,
            streaming=streaming,
            lora_request=lora_request,
            kv_cache_retention_config=kv_cache_retention_config,
            trace_headers=trace_headers,
            cache_salt=cache_salt,
        )
        return self._submit(inputs, request)

    def _submit(self, inputs: Any, request: GenerationRequest) -> RequestOutput:
        executor = self._executor
        if executor is None or executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        params = self._prepare_sampling_params(request.sampling_params)
        prompt, tokens = self._tokens_of(inputs)
        self._check_arguments(tokens)
        request.prompt_token_ids = tokens
        request.sampling_params = params
        return executor.submit(request, prompt)

    def generate(
        self,
        inputs: str | list[int] | Sequence[str] | Sequence[list[int]],
        sampling_params: SamplingParams | None = None,
    ) -> Any:
        """Generate for one prompt or a list of prompts; blocks. For threads without a loop."""
        is_single = isinstance(inputs, str) or (bool(inputs) and isinstance(inputs[0], int))
        prompts: Any = [inputs] if is_single else inputs
        results = [self.generate_async(each, sampling_params) for each in prompts]
        finished = [result.result() for result in results]
        return finished[0] if is_single else finished

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Return the statistics since the last call; [] before the first submission."""
        return [] if self._executor is None else self._executor.get_stats(timeout)

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """Return an iterable of statistics, the same one every time; not a coroutine."""
        result = None if self._executor is None else self._executor.stats(timeout)
        return empty_async_iterable() if result is None else result

    def shutdown(self) -> None:
        """Shut down; blocks, and does nothing the second time."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        if self.mpi_session is not None:
            self.mpi_session.shutdown()
            self.mpi_session = None

    def _check_health(self) -> bool:
        return self._executor is not None and not self._executor.is_shutdown()

    def _load_tokenizer(self, folder: Path, eos_token_id: int | None) -> TokenizerBase | None:
        if self.args.skip_tokenizer_init:
            return None
        chosen = self.args.tokenizer
        if isinstance(chosen, TokenizerBase):
            return chosen
        return TokenizerBase.from_folder(Path(chosen) if chosen else folder, eos_token_id)

    def _prepare_sampling_params(self, params: Any) -> SamplingParams:
        if params is None:
            params = SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(
                f"The sampling_params must be type SamplingParams or None, but got {type(params)}"
            )
        # Stop strings are processed only here, and only if `end_id` is not set.
        if params.end_id is None:
            if self.tokenizer is None:
                raise ValueError(
                    "tokenizer is required to reset end_id if it is None, or you can explicitly "
                    "specify the end_id for sampling_params"
                )
            params._setup(self.tokenizer)
        params._stream_interval = self.args.stream_interval
        params.return_perf_metrics = params.return_perf_metrics or self.args.return_perf_metrics
        return params

    def _tokens_of(self, inputs: Any) -> tuple[str | None, list[int]]:
        if isinstance(inputs, Mapping):
            inputs = (
                inputs["prompt_token_ids"] if "prompt_token_ids" in inputs else inputs["prompt"]
            )
        if isinstance(inputs, str):
            if self.tokenizer is None:
                raise ValueError("tokenizer is required to tokenize a string prompt")
            return inputs, self.tokenizer.encode(inputs)
        if not isinstance(inputs, list):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        if not isinstance(inputs[0], int):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        return None, inputs

    def _check_arguments(self, tokens: list[int]) -> None:
        max_num_tokens = self.args.max_num_tokens or 8192
        if not self.args.enable_chunked_prefill and len(tokens) > max_num_tokens:
            raise RequestError(
                f"The sum of prompt length ({len(tokens)}), query length (0) should not exceed "
                f"max_num_tokens ({max_num_tokens})"
            )

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        self.shutdown()

    def __getstate__(self) -> object:
        raise RuntimeError("LLM object can not be pickled.")


def _shutdown_if_alive(llm: weakref.ref[LLM]) -> None:
    alive = llm()
    if alive is not None:
        alive.shutdown()
