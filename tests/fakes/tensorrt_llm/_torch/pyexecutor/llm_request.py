"""A request inside the engine, with a copy of its parameters, its tokens, its pages and its finish
reason.
"""

import copy
import enum
from dataclasses import dataclass, field

from tensorrt_llm._torch.pyexecutor.guides import TokenGuide
from tensorrt_llm.executor.request import GenerationRequest, RequestError
from tensorrt_llm.sampling_params import is_greedy

Logprobs = dict[int, tuple[float, int]]
"""Logprob and rank by token."""


class FinishReason(enum.IntEnum):
    """Why a sequence ended; the values are the same as in the real package's C++ binding."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    CANCELLED = 5


@dataclass(slots=True)
class Response:
    """New tokens of one request, its end, or its error.

    `error`: a string if the request failed, an exception if the engine failed.
    """

    client_id: int
    tokens: list[int] = field(default_factory=list)
    is_final: bool = True
    finish: FinishReason = FinishReason.NOT_FINISHED
    logprobs: list[Logprobs] = field(default_factory=list)
    cached_tokens: int = 0
    error: str | BaseException | None = None


class LlmRequest:
    """A request in the worker. It copies the parameters, so that later changes to the submitted
    ones have no effect.
    """

    def __init__(self, request: GenerationRequest, max_seq_len: int) -> None:
        params = copy.copy(request.sampling_params)
        lora_id = request.lora_request.lora_int_id if request.lora_request is not None else 0
        self.client_id = request.id
        self.params = params
        self.prompt = list(request.prompt_token_ids)
        self.max_tokens = _deduced_max_tokens(request, max_seq_len)
        self.reuse_root = (request.cache_salt, lora_id)
        self.state = lora_id
        self.end_id = -1 if params.ignore_eos or params.end_id is None else int(params.end_id)
        self.stop_ids: frozenset[int] = frozenset(params.stop_token_ids or ())
        self.guide: TokenGuide | None = None
        self.generated: list[int] = []
        self.unsent_tokens: list[int] = []
        self.unsent_logprobs: list[Logprobs] = []
        self.num_computed = 0
        self.cached_tokens = 0
        self.blocks: list[int] = []
        self.block_keys: list[int] = []
        self.num_stored = 0
        self.finish = FinishReason.NOT_FINISHED

    @property
    def is_plain(self) -> bool:
        """Whether the next token is always the one with the highest logit of the model."""
        params = self.params
        return is_greedy(params) and not (
            self.guide
            or params.logprobs
            or params.min_tokens
            or params.embedding_bias is not None
            or (params.repetition_penalty or 1.0) != 1.0
            or params.presence_penalty
            or params.frequency_penalty
        )

    @property
    def num_tokens_to_compute(self) -> int:
        """Number of tokens of the prompt and the output that are not in the cache; after a
        preemption, all.
        """
        return len(self.prompt) + len(self.generated) - self.num_computed

    @property
    def is_prefilled(self) -> bool:
        """Whether only the newest token is not in the cache."""
        return bool(self.generated) and bool(self.blocks) and self.num_tokens_to_compute == 1

    def end_of(self, token: int, max_seq_len: int) -> FinishReason:
        """Return the finish reason that the newest token causes; NOT_FINISHED if it does not end
        the request.
        """
        if token == self.end_id:
            return FinishReason.END_ID
        if token in self.stop_ids:
            return FinishReason.STOP_WORDS
        count = len(self.generated)
        if count >= self.max_tokens or len(self.prompt) + count >= max_seq_len:
            return FinishReason.LENGTH
        return FinishReason.NOT_FINISHED

    def response(self) -> Response:
        """Return a response with the tokens and logprobs that were not yet sent."""
        tokens, self.unsent_tokens = self.unsent_tokens, []
        logprobs, self.unsent_logprobs = self.unsent_logprobs, []
        return Response(
            self.client_id,
            tokens,
            is_final=self.finish is not FinishReason.NOT_FINISHED,
            finish=self.finish,
            logprobs=logprobs,
            cached_tokens=self.cached_tokens,
        )


def _deduced_max_tokens(request: GenerationRequest, max_seq_len: int) -> int:
    """Return the maximum number of output tokens of a request, limited to what fits after the
    prompt. Raises RequestError if the prompt is too long or no token may be generated.
    """
    length = len(request.prompt_token_ids)
    if length > max_seq_len:
        raise RequestError(f"The prompt length ({length}) exceeds max_seq_len ({max_seq_len})")
    room = max_seq_len - length
    asked: int | None = request.sampling_params.max_tokens
    max_tokens = room if asked is None else min(asked, room)
    if max_tokens <= 0:
        raise RequestError(f"maxNewTokens ({max_tokens}) must be positive")
    return max_tokens
