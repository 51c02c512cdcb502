"""The work of one step on its requests: prefill, tokens, ends, and released pages.

Owns what happens to a request in an iteration. Does not choose the requests of an iteration.
"""

from __future__ import annotations

import time

from tensorrt_llm._torch.pyexecutor.hashed_model import advance
from tensorrt_llm._torch.pyexecutor.kv_cache_manager import (
    DEFAULT_PRIORITY,
    KvCacheManager,
    block_keys,
)
from tensorrt_llm._torch.pyexecutor.llm_request import FinishReason, LlmRequest
from tensorrt_llm._torch.pyexecutor.response import Response, perf_metrics
from tensorrt_llm._torch.pyexecutor.sampler import TorchSampler, TRTLLMSampler
from tensorrt_llm._torch.pyexecutor.scheduler import Scheduled
from tensorrt_llm.fake_control import Settings
from tensorrt_llm.llmapi.limits import EngineLimits


class Generation:
    def __init__(self, limits: EngineLimits, settings: Settings, pool: KvCacheManager) -> None:
        self._limits = limits
        self._settings = settings
        self._pool = pool
        self._model = limits.model
        kind = TRTLLMSampler if limits.is_trtllm_sampler else TorchSampler
        self._sampler = kind(limits.model)

    def run(self, step: Scheduled, iteration: int, responses: list[Response]) -> None:
        """Compute a step and append its responses."""
        for request, count in step.context:
            request.num_computed += count
            if request.num_tokens_to_compute == 0:
                self._prefilled(request)
                self._generate(request, 1, iteration, responses)
        for request, count in step.generation:
            request.num_computed += count
            self._generate(request, count, iteration, responses)

    def end(self, request: LlmRequest, reason: FinishReason, iteration: int = 0) -> Response:
        """End a request, keep its full pages in the reuse index, and return its last response."""
        request.finish = reason
        if self._limits.is_reusing and request.blocks:
            self._store(request, request.prompt + request.generated[:-1])
        self._give_back(request)
        return self._response(request, iteration)

    def fail(self, request: LlmRequest, message: str = "") -> Response:
        """End a request with an error."""
        self._give_back(request)
        return Response(
            request.client_id, [], is_final=True, error=message or self._settings.fail_message
        )

    def _prefilled(self, request: LlmRequest) -> None:
        if not request.generated:
            request.state = advance(request.state, request.prompt)
        if self._limits.is_reusing:
            self._store(request, request.prompt)

    def _generate(
        self, request: LlmRequest, count: int, iteration: int, responses: list[Response]
    ) -> None:
        """Generate `count` tokens, or fewer if one of them ends the request."""
        settings = self._settings
        if request.generated == [] and any(t in request.prompt for t in settings.fail_tokens):
            responses.append(self.fail(request))
            return
        for position in range(count):
            if len(request.generated) == settings.fail_at_output:
                responses.append(self.fail(request))
                return
            token = self._next(request)
            reason = request.end_of(token, self._limits.max_seq_len)
            if reason is not FinishReason.NOT_FINISHED:
                request.num_computed -= count - 1 - position
                if reason is FinishReason.END_ID and not settings.is_end_token_kept:
                    del request.unsent_tokens[-1:], request.unsent_logprobs[-1:]
                responses.append(self.end(request, reason, iteration))
                return
        if request.streaming and (
            self._limits.stream_interval == 1
            or len(request.generated) == 1
            or len(request.generated) % self._limits.stream_interval == 0
        ):
            responses.append(self._response(request, iteration))

    def _next(self, request: LlmRequest) -> int:
        """Choose a token and update the state with it."""
        if request.is_plain:
            token = self._model.top_token(request.state)
        else:
            token, logprobs = self._sampler.choose(request)
            if logprobs is not None:
                request.unsent_logprobs.append(logprobs)
                request.cumulative_logprob += logprobs[token][0]
        request.state = advance(request.state, (token,))
        if not request.generated:
            request.first_token_at_s = time.monotonic()
        request.generated.append(token)
        request.unsent_tokens.append(token)
        return token

    def _response(self, request: LlmRequest, iteration: int) -> Response:
        tokens, request.unsent_tokens = request.unsent_tokens, []
        response = Response(
            request.client_id,
            tokens,
            request.finish is not FinishReason.NOT_FINISHED,
            request.finish,
            cached_tokens=request.cached_tokens,
            iteration=iteration,
        )
        if response.is_final and request.has_perf_metrics:
            response.perf_metrics = perf_metrics(request)
        if request.num_logprobs:
            response.logprobs, request.unsent_logprobs = request.unsent_logprobs, []
            response.cumulative_logprob = request.cumulative_logprob
        return response

    def _store(self, request: LlmRequest, tokens: list[int]) -> None:
        """Add full pages that are not yet in the reuse index."""
        size = self._pool.tokens_per_block
        num_full = min(len(tokens), request.num_computed) // size
        if num_full <= request.num_stored:
            return
        keys = block_keys(request.reuse_root, tokens[: num_full * size], size)
        for index in range(request.num_stored, num_full):
            priority = DEFAULT_PRIORITY
            if request.retention is not None:
                is_prompt = index * size < len(request.prompt)
                priority = (
                    request.retention.priority_of(index * size)
                    if is_prompt
                    else request.retention.decode_retention_priority
                )
            self._pool.store(request.blocks[index], keys[index], priority)
        request.num_stored = num_full

    def _give_back(self, request: LlmRequest) -> None:
        self._pool.release(request.blocks)
        request.blocks = []
