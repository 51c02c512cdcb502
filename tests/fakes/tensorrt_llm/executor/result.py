"""The result that a caller reads: one object per request, which the engine updates in place.

It is read on the event loop of the submission.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Generator
from typing import TYPE_CHECKING, Any

from tensorrt_llm._torch.pyexecutor.llm_request import FinishReason, Response
from tensorrt_llm.executor.async_queue import AsyncQueue
from tensorrt_llm.executor.request import GenerationRequest
from tensorrt_llm.recorded import recorded

if TYPE_CHECKING:
    from tensorrt_llm.executor.proxy import GenerationExecutorProxy

_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
}


Logprob = recorded("tensorrt_llm.executor.result.Logprob")
CompletionOutput = recorded("tensorrt_llm.llmapi.CompletionOutput")


class RequestOutput:
    """The result of a submitted request. Asynchronous iteration yields this same object after each
    response.
    """

    def __init__(self, request: GenerationRequest, executor: GenerationExecutorProxy) -> None:
        self.request_id = request.id
        self.prompt_token_ids = request.prompt_token_ids
        self.outputs = [CompletionOutput(index=0)]
        self.finished = False
        self.cached_tokens = 0
        # Recorded, but read by no caller.
        self.prompt = self.context_logits = self.trace_headers = self.disaggregated_params = None
        self.metrics_dict = self.decoding_iter = self.avg_decoded_tokens_per_iter = None
        self.queue: AsyncQueue[Response] = AsyncQueue()
        self._params = request.sampling_params
        self._executor = weakref.proxy(executor)

    def abort(self) -> None:
        """Ask the engine to end the request, and return at once. A waiting reader is not woken."""
        self._executor.abort_request(self.request_id)

    def aborted(self) -> bool:
        """Return whether `abort` was called, even if it had no effect."""
        return self.request_id in self._executor.aborted

    def result(self, timeout: float | None = None) -> RequestOutput:
        raise NotImplementedError("the stand-in is read on a loop")

    async def aresult(self) -> RequestOutput:
        async for _ in self:
            pass
        return self

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        self._handle(await self.queue.get())
        return self

    def _handle(self, response: Response) -> None:
        # May shut down the whole engine before it raises.
        self._executor.raise_error(response.error)
        output = self.outputs[0]
        output.token_ids.extend(response.tokens)
        slip_token = self._executor.settings.slip_token
        assert slip_token not in self.prompt_token_ids, "logprobs length: 0 != output.length"
        self.cached_tokens = response.cached_tokens
        output.logprobs += [
            {token: Logprob(logprob=value, rank=rank) for token, (value, rank) in position.items()}
            for position in response.logprobs
        ]
        if response.is_final:
            self._finish(output, response)

    def _finish(self, output: Any, response: Response) -> None:
        self.finished = True
        output.finish_reason = _REASONS[response.finish]
        if response.finish is FinishReason.STOP_WORDS:
            output.stop_reason = output.token_ids[-1]
            if not self._params.include_stop_str_in_output:
                # Becomes shorter than what was read before.
                output.token_ids = output.token_ids[:-1]


class IterationResult:
    """Iterates over statistics as they arrive. All readers share one object.

    The iteration ends after a timeout without an item, and stays ended until `mark_undone`.
    """

    def __init__(self) -> None:
        self.queue: AsyncQueue[dict[str, Any]] = AsyncQueue()
        self.timeout_s: float | None = None
        self._is_done = False

    def mark_undone(self) -> None:
        self._is_done = False

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._is_done:
            raise StopAsyncIteration
        try:
            return await self.queue.get(self.timeout_s)
        except TimeoutError as error:
            self._is_done = True
            raise StopAsyncIteration from error
