"""A request inside the engine: its original parameters, its tokens, its pages, its end."""

from __future__ import annotations

import enum
import time
from typing import Any

from tensorrt_llm._torch.pyexecutor.guides import TokenGuide
from tensorrt_llm.executor.errors import RequestError
from tensorrt_llm.executor.request import GenerationRequest


class FinishReason(enum.IntEnum):
    """Why a sequence ended, by the binding's numbers."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class LlmRequest:
    """A request in the worker, made from a copy: later changes of the submitted request have no
    effect."""

    __slots__ = (
        "arrived_at_s", "bad_ids", "bias", "block_keys", "blocks", "cached_tokens", "client_id",
        "cumulative_logprob", "end_id", "finish", "first_token_at_s", "generated", "guide",
        "has_perf_metrics", "is_greedy", "is_plain", "max_tokens", "min_p", "min_tokens",
        "num_computed", "num_logprobs",
        "num_stored", "penalties", "priority", "prompt", "retention", "reuse_root", "seed", "state",
        "stop_ids", "stop_words", "streaming", "temperature", "top_k", "top_p", "unsent_logprobs",
        "unsent_tokens",
    )  # fmt: skip

    def __init__(self, request: GenerationRequest, max_tokens: int) -> None:
        params = request.sampling_params
        self.client_id = request.id
        self.prompt = list(request.prompt_token_ids)
        self.streaming = request.streaming
        self.max_tokens = max_tokens
        self.priority = request.priority
        self.retention = request.kv_cache_retention_config
        lora_id = request.lora_request.lora_int_id if request.lora_request is not None else 0
        self.reuse_root = (request.cache_salt, lora_id)
        self.state = lora_id
        self.end_id = -1 if params.ignore_eos or params.end_id is None else int(params.end_id)
        words = [ids for _, ids in params._get_stop_reasons_and_words()]
        self.stop_ids = frozenset(ids[0] for ids in words if len(ids) == 1)
        self.stop_words = [ids for ids in words if len(ids) > 1]
        self.has_perf_metrics: bool = params.return_perf_metrics
        self._read_sampling(params)
        self.generated: list[int] = []
        self.unsent_tokens: list[int] = []
        self.unsent_logprobs: list[dict[int, tuple[float, int]]] = []
        self.cumulative_logprob = 0.0
        self.num_computed = 0
        self.cached_tokens = 0
        self.blocks: list[int] = []
        self.block_keys: list[int] = []
        self.num_stored = 0
        self.finish = FinishReason.NOT_FINISHED
        self.arrived_at_s = time.monotonic()
        self.first_token_at_s: float | None = None

    def _read_sampling(self, params: Any) -> None:
        self.is_greedy: bool = params._greedy_decoding
        self.temperature: float = 1.0 if params.temperature is None else params.temperature
        self.top_k: int = params.top_k or 0
        self.top_p: float = 1.0 if params.top_p is None else params.top_p
        self.min_p: float = params.min_p or 0.0
        self.seed: int = params.seed or 0
        self.min_tokens: int = params.min_tokens or 0
        self.num_logprobs: int = params.logprobs or 0
        self.bias: Any = params.embedding_bias
        self.bad_ids: list[int] = [
            *(params.bad_token_ids or []),
            *(ids[0] for ids in params._bad_word_ids or [] if len(ids) == 1),
        ]
        self.penalties: tuple[float, float, float] = (
            1.0 if params.repetition_penalty is None else params.repetition_penalty,
            params.presence_penalty or 0.0,
            params.frequency_penalty or 0.0,
        )
        self.guide: TokenGuide | None = None
        self.is_plain = self.is_greedy and not (
            self.num_logprobs or self.bad_ids or self.min_tokens or self.bias is not None
            or self.penalties != (1.0, 0.0, 0.0)
        )  # fmt: skip

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens of the prompt, and after preemption of the output, that are not yet in
        the cache."""
        return len(self.prompt) + len(self.generated) - self.num_computed

    @property
    def is_prefilled(self) -> bool:
        """Whether the cache lacks only the token generated last."""
        return bool(self.generated) and bool(self.blocks) and self.num_tokens_to_compute == 1

    def end_of(self, token: int, max_seq_len: int) -> FinishReason:
        """Return the finish reason that the token just generated causes."""
        if token == self.end_id:
            return FinishReason.END_ID
        if token in self.stop_ids:
            return FinishReason.STOP_WORDS
        for word in self.stop_words:
            if self.generated[-len(word) :] == word:
                return FinishReason.STOP_WORDS
        count = len(self.generated)
        if count >= self.max_tokens or len(self.prompt) + count >= max_seq_len:
            return FinishReason.LENGTH
        return FinishReason.NOT_FINISHED


def deduce_max_tokens(request: GenerationRequest, max_seq_len: int) -> int:
    """Return the maximum output tokens of a request, silently limited to the free length."""
    length = len(request.prompt_token_ids)
    if length > max_seq_len:
        raise RequestError(f"The prompt length ({length}) exceeds max_seq_len ({max_seq_len})")
    room = max_seq_len - length
    asked: int | None = request.sampling_params.max_tokens
    max_tokens = room if asked is None else min(asked, room)
    if max_tokens <= 0:
        raise RequestError(f"maxNewTokens ({max_tokens}) must be positive")
    return max_tokens
