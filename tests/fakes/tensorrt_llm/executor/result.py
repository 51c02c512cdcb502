"""The result that a caller reads: one object per request, which the engine updates in place."""

from __future__ import annotations

import queue
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensorrt_llm._torch.pyexecutor.llm_request import FinishReason
from tensorrt_llm._torch.pyexecutor.response import Response
from tensorrt_llm.executor.async_queue import AsyncQueue, make_queue
from tensorrt_llm.executor.request import GenerationRequest

if TYPE_CHECKING:
    from tensorrt_llm.executor.proxy import GenerationExecutorProxy
    from tensorrt_llm.llmapi.tokenizer import TokenizerBase

_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "timeout",
    FinishReason.CANCELLED: "cancelled",
}


@dataclass(slots=True)
class Logprob:
    """The logprob of one token at one position; rank 1 is the likeliest."""

    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sequence. Cumulative; `*_diff` are the additions of the last response."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: Any = None
    additional_generation_outputs: Any = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None
    _last_text_len: int = field(default=0, init=False, repr=False)
    _last_token_ids_len: int = field(default=0, init=False, repr=False)
    _last_logprobs_len: int = field(default=0, init=False, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        return self.logprobs[self._last_logprobs_len :]


class RequestOutput:
    """A submitted request: iteration yields this object each time."""

    def __init__(
        self,
        request: GenerationRequest,
        executor: GenerationExecutorProxy,
        on_error: Callable[[str | BaseException | None], None],
        tokenizer: TokenizerBase | None,
        prompt: str | None,
    ) -> None:
        self.request_id = request.id
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.outputs = [CompletionOutput(index=0)]
        self.finished = False
        self.context_logits = None
        self.cached_tokens = 0
        self.decoding_iter = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self.metrics_dict: dict[Any, float] = {}
        self.trace_headers = request.trace_headers
        self.disaggregated_params = None
        self.queue: AsyncQueue[Response] | queue.Queue[Response] = make_queue(Response)
        self._params = request.sampling_params
        self._executor = weakref.ref(executor)
        self._on_error = on_error
        self._tokenizer = tokenizer
        self._is_aborted = False
        self._slip_token = executor.slip_token

    def abort(self) -> None:
        """Ask the engine to end the request and return; wakes no reader."""
        executor = self._executor()
        assert executor is not None, "The executor is not set for this result."
        executor.abort_request(self.request_id)
        self._is_aborted = True

    def aborted(self) -> bool:
        """Return whether `abort` was called, whatever its effect."""
        return self._is_aborted

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end, without a loop."""
        while not self.finished:
            assert isinstance(self.queue, queue.Queue), "submitted from a loop: use aresult()"
            self._handle(self.queue.get())
        return self

    async def aresult(self) -> RequestOutput:
        while not self.finished:
            await self._step()
        return self

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        await self._step()
        return self

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        if self.finished:
            raise StopIteration
        assert isinstance(self.queue, queue.Queue), "submitted from a loop: use async for"
        self._handle(self.queue.get())
        return self

    async def _step(self) -> None:
        assert isinstance(self.queue, AsyncQueue), (
            "The asyncio event loop was not present during initialization, so async operations "
            "are not available."
        )
        self._handle(await self.queue.get())

    def _handle(self, response: Response) -> None:
        # May shut down the whole engine before it raises.
        self._on_error(response.error)
        output = self.outputs[0]
        output._last_token_ids_len = len(output.token_ids)
        output._last_text_len = len(output.text)
        output.token_ids.extend(response.tokens)
        assert self._slip_token not in self.prompt_token_ids, "logprobs length: 0 != output.length"
        self.cached_tokens = response.cached_tokens
        self.decoding_iter = response.iteration
        if response.logprobs is not None:
            output._last_logprobs_len = len(output.logprobs)
            output.logprobs += [
                {token: Logprob(*entry) for token, entry in position.items()}
                for position in response.logprobs
            ]
            output.cumulative_logprob = response.cumulative_logprob
        if response.is_final:
            self._finish(output, response)
        if self._params.detokenize and self._tokenizer is not None:
            self._write_text(output)

    def _finish(self, output: CompletionOutput, response: Response) -> None:
        self.finished = True
        output.finish_reason = _REASONS[response.finish]
        output.request_perf_metrics = response.perf_metrics
        if response.finish is not FinishReason.STOP_WORDS:
            return
        for reason, ids in self._params._get_stop_reasons_and_words():
            if output.token_ids[-len(ids) :] == ids:
                output.stop_reason = reason
                if not self._params.include_stop_str_in_output:
                    # May become shorter than what was read before.
                    output.token_ids = output.token_ids[: -len(ids)]
                break

    def _write_text(self, output: CompletionOutput) -> None:
        """Write the text of all tokens, cut at a stop string; the engine is not notified of this
        end."""
        assert self._tokenizer is not None
        output.text = self._tokenizer.decode(output.token_ids)
        stops = self._params.stop
        for stop in [stops] if isinstance(stops, str) else stops or []:
            position = output.text.find(stop)
            if position >= 0:
                end = position + len(stop) * self._params.include_stop_str_in_output
                output.text = output.text[:end]
                output.finish_reason, output.stop_reason = "stop", stop
                self.finished = True
                break


class IterationResult:
    """Statistics as they arrive: one object for all readers, which ends when none arrive.

    Ends after `timeout` seconds without an item; stays ended until `mark_undone`.
    """

    def __init__(self) -> None:
        self.queue: AsyncQueue[dict[str, Any]] | queue.Queue[dict[str, Any]] = make_queue(dict)
        self._timeout_s: float | None = None
        self._is_done = False

    def set_timeout(self, timeout: float | None) -> None:
        self._timeout_s = timeout

    def mark_undone(self) -> None:
        """Let iteration start again."""
        self._is_done = False

    def add(self, stats: dict[str, Any]) -> None:
        """Add statistics from the thread that reads them."""
        if isinstance(self.queue, AsyncQueue):
            self.queue.put_nowait(stats)
            AsyncQueue.notify_many(self.queue.loop, [self.queue])
        else:
            self.queue.put(stats)

    def get_results(self) -> list[dict[str, Any]]:
        """Return all statistics, after `timeout` at the latest; for callers without a loop."""
        found: list[dict[str, Any]] = []
        assert isinstance(self.queue, queue.Queue), "bound to a loop: use async for"
        try:
            found.append(self.queue.get(timeout=self._timeout_s))
            while True:
                found.append(self.queue.get_nowait())
        except queue.Empty:
            return found

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._is_done:
            raise StopAsyncIteration
        assert isinstance(self.queue, AsyncQueue), "The asyncio event loop was not present"
        try:
            return await self.queue.get(self._timeout_s)
        except TimeoutError as error:
            self._is_done = True
            raise StopAsyncIteration from error
