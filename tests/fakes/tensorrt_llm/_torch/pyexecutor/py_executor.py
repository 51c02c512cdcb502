"""The engine loop, which accepts requests, runs iterations and sends results.

It runs in one thread, and passes its results to `respond` and its statistics to `report` after each
iteration.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorrt_llm._torch.pyexecutor.guides import TokenGuide, texts_of
from tensorrt_llm._torch.pyexecutor.hashed_model import advance
from tensorrt_llm._torch.pyexecutor.kv_cache_manager import KvCacheManager, block_keys
from tensorrt_llm._torch.pyexecutor.llm_request import FinishReason, LlmRequest, Response
from tensorrt_llm._torch.pyexecutor.sampler import DeviceAssertError, TorchSampler, TRTLLMSampler
from tensorrt_llm._torch.pyexecutor.scheduler import Scheduled, StepScheduler
from tensorrt_llm.executor.request import CppExecutorError, GenerationRequest, RequestError
from tensorrt_llm.fake_control import Settings

if TYPE_CHECKING:
    from tensorrt_llm.llmapi.llm import EngineLimits

Inbox = list[GenerationRequest | int]


class PyExecutor:
    """An engine; its constructor starts the loop."""

    def __init__(
        self,
        limits: EngineLimits,
        settings: Settings,
        respond: Callable[[list[Response]], None],
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self.settings = settings
        self.limits = limits
        self.pool = KvCacheManager(limits.num_blocks, limits.tokens_per_block)
        self.waiting: dict[int, LlmRequest] = {}
        self.active: dict[int, LlmRequest] = {}
        self.iteration = 0
        self.released = threading.Event()
        self._respond = respond
        self._report = report
        self._scheduler = StepScheduler(self.pool, limits)
        sampler = TRTLLMSampler if limits.is_trtllm_sampler else TorchSampler
        self._sampler = sampler(limits.model)
        self._inbox: Inbox = []
        self._faults: set[str] = set()
        self._num_allowed = 0
        self._is_running = False
        self._is_stuck = False
        self._next_at_s = 0.0
        self._stopped = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="fake-engine-loop", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # Calls from other threads.

    def put(self, item: GenerationRequest | int) -> None:
        """Queue a request, or the id of a request to cancel. Never blocks or rejects: the queue is
        unbounded.
        """
        with self._changed:
            self._inbox.append(item)
            self._changed.notify_all()

    def inject(self, fault: str) -> None:
        """Inject a fault into the next iteration; the iteration runs even if there is no work.

        "kill" ends the loop silently, and no request gets a response; "fatal" ends the engine with
        an error that consumers receive; "hang" blocks until `release`; "fail_all" fails every
        active request.
        """
        with self._changed:
            self._faults.add(fault)
            self._changed.notify_all()

    def pause(self, is_paused: bool = True) -> None:
        """Pause the loop, so that only `step` and `inject` cause iterations. `is_paused` False: end
        the pause.
        """
        with self._changed:
            self.settings.is_paused = is_paused
            self._changed.notify_all()

    def step(self, count: int = 1, timeout_s: float = 30.0) -> None:
        """Run `count` iterations of the paused loop, also if there is no work, and return when they
        are done. By then their responses are in the results' queues.

        Raises TimeoutError if the engine is dead or hangs.
        """
        with self._changed:
            self._num_allowed += count
            # An iteration that began before the pause may still run; it does not count.
            last = self.iteration + self._is_running + self._num_allowed
            self._changed.notify_all()
        self.wait_for_iteration(last, timeout_s)

    def wait_for_iteration(self, iteration: int, timeout_s: float = 30.0) -> None:
        """Wait until this iteration has ended. Raises TimeoutError after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.iteration >= iteration, timeout_s):
                raise TimeoutError(f"iteration {iteration} did not end within {timeout_s} s")

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop; its requests get no response. Waits at most `timeout_s` for the thread."""
        with self._changed:
            self._stopped.set()
            self.released.set()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # The loop.

    def _may_run(self) -> bool:
        if self._stopped.is_set() or self._faults:
            return True
        if self.settings.is_paused:
            return self._num_allowed > 0
        return bool(self._inbox) or (not self._is_stuck and bool(self.waiting or self.active))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_run)
                inbox, self._inbox = self._inbox, []
                faults, self._faults = self._faults, set()
                self._num_allowed = max(0, self._num_allowed - 1)
                self._is_running = True
            if self._stopped.is_set() or not self._run_iteration(inbox, faults):
                return
            with self._changed:
                self.iteration += 1
                self._is_running = False
                self._changed.notify_all()

    def _run_iteration(self, inbox: Inbox, faults: set[str]) -> bool:
        """Run one iteration; return False if it was the last."""
        responses: list[Response] = []
        self._take_in(inbox, responses, faults)
        if not self._survives(faults, responses):
            return False
        step = self._scheduler.schedule(self.active.values())
        self._is_stuck = step.is_empty and not responses
        if not step.is_empty:
            self._take_time()
            try:
                self._compute(step, responses)
            except DeviceAssertError as error:
                # All active requests get the error, and the loop ends; reported health stays.
                self._fail_all(responses, str(error))
                self._respond(responses)
                return False
        for response in responses:
            if response.is_final:
                self.active.pop(response.client_id, None)
        if self._stopped.is_set():
            return False
        if responses:
            self._respond(responses)
        if self.limits.has_stats and not step.is_empty:
            self._report(self._stats())
        return True

    def _survives(self, faults: set[str], responses: list[Response]) -> bool:
        """Apply the faults; return False if they end the loop."""
        if "kill" in faults:
            return False
        if "hang" in faults:
            self.released.wait()
            self.released.clear()
        if "fatal" in faults:
            error = CppExecutorError("the executor failed")
            everyone = [*self.active, *self.waiting]
            self._respond([Response(request_id, error=error) for request_id in everyone])
            return False
        if "fail_all" in faults:
            self._fail_all(responses, self.settings.fail_message)
        return True

    def _take_time(self) -> None:
        """Wait until `step_s` after the end of the previous wait. If that time has already passed,
        wait for `step_s`.
        """
        step_s = self.settings.step_s
        if step_s <= 0.0:
            return
        now_s, due_s = time.perf_counter(), self._next_at_s + step_s
        self._next_at_s = due_s if now_s < due_s <= now_s + step_s else now_s + step_s
        self._stopped.wait(self._next_at_s - time.perf_counter())

    def _stats(self) -> dict[str, Any]:
        """Return statistics in the format of the real engine's JSON, only with the fields that the
        executor reads.
        """
        drift = self.settings.free_blocks_drift
        return {
            "maxNumActiveRequests": self.limits.max_batch_size,
            # 0 even while requests wait.
            "numQueuedRequests": 0,
            "kvCacheStats": {
                "maxNumBlocks": self.pool.num_blocks,
                "freeNumBlocks": self.pool.num_free + drift,
                "usedNumBlocks": self.pool.num_used - drift,
                "tokensPerBlock": self.pool.tokens_per_block,
            },
        }

    # Requests that come, and those that are cancelled.

    def _take_in(self, inbox: Inbox, responses: list[Response], faults: set[str]) -> None:
        """Move new requests into the waiting queue, apply cancels, activate waiting requests."""
        for item in inbox:
            if not isinstance(item, int):
                self._receive(item, responses, faults)
        for item in inbox:
            # A cancelled request that waits never gets a response.
            if isinstance(item, int) and self.waiting.pop(item, None) is None:
                request = self.active.pop(item, None)
                if request is not None:
                    responses.append(self._end(request, FinishReason.CANCELLED))
        while self.waiting and len(self.active) < self.limits.max_batch_size:
            request_id = next(iter(self.waiting))
            self.active[request_id] = self.waiting.pop(request_id)

    def _receive(
        self, item: GenerationRequest, responses: list[Response], faults: set[str]
    ) -> None:
        try:
            self.waiting[item.id] = self._admit(item)
        except FileNotFoundError as error:
            # The worker does not catch this: it ends, and only the next submission reveals it.
            self._respond([Response(0, error=error)])
            faults.add("kill")
        except RequestError as error:
            responses.append(Response(item.id, error=str(error)))
        settings, number = self.settings, self.iteration + 1
        for fault, token, at in (
            ("kill", settings.kill_loop_token, settings.kill_loop_at),
            ("fatal", settings.fatal_token, settings.fatal_at),
            ("hang", settings.hang_token, 0),
        ):
            if at == number or token in item.prompt_token_ids:
                faults.add(fault)

    def _admit(self, item: GenerationRequest) -> LlmRequest:
        """Validate a request as the worker does. Raises RequestError if it is rejected,
        FileNotFoundError for an adapter without a folder.
        """
        limits, prompt = self.limits, item.prompt_token_ids
        if min(prompt) < 0 or max(prompt) >= limits.model.vocab_size:
            raise RequestError(f"Token ID out of range (vocab size {limits.model.vocab_size})")
        if item.lora_request is not None:
            if not limits.has_lora:
                raise RequestError("LoRA is not enabled")
            if not Path(item.lora_request.lora_path).exists():
                raise FileNotFoundError(item.lora_request.lora_path)
        request = LlmRequest(item, limits.max_seq_len)
        guide = request.params.guided_decoding
        if guide is not None:
            if limits.guide_tokenizer is None:
                raise RequestError("Guided decoding is not enabled: set guided_decoding_backend")
            try:
                texts = [limits.guide_tokenizer.encode(text) for text in texts_of(guide)]
            except ValueError as error:
                reason = self.settings.guided_error or str(error)
                raise RequestError(f"Guided decoding error: {reason}") from error
            request.guide = TokenGuide(texts, request.end_id)
        return request

    # The work of a step on its requests.

    def _compute(self, step: Scheduled, responses: list[Response]) -> None:
        for request, count in step.context:
            request.num_computed += count
            if request.num_tokens_to_compute > 0:
                continue
            if not request.generated:
                request.state = advance(request.state, request.prompt)
            self._store(request, request.prompt)
            responses.append(self._generate(request, 1))
        for request, count in step.generation:
            request.num_computed += count
            responses.append(self._generate(request, count))

    def _generate(self, request: LlmRequest, count: int) -> Response:
        """Generate `count` tokens, or fewer if one of them ends the request or the
        request fails.
        """
        settings = self.settings
        if not request.generated and not set(settings.fail_tokens).isdisjoint(request.prompt):
            return self._fail(request, settings.fail_message)
        for position in range(count):
            if len(request.generated) == settings.fail_at_output:
                return self._fail(request, settings.fail_message)
            reason = request.end_of(self._next(request), self.limits.max_seq_len)
            if reason is not FinishReason.NOT_FINISHED:
                request.num_computed -= count - 1 - position
                return self._end(request, reason)
        return request.response()

    def _next(self, request: LlmRequest) -> int:
        if request.is_plain:
            token = self.limits.model.top_token(request.state)
        else:
            token, logprobs = self._sampler.choose(request)
            if logprobs is not None:
                request.unsent_logprobs.append(logprobs)
        request.state = advance(request.state, (token,))
        request.generated.append(token)
        request.unsent_tokens.append(token)
        return token

    def _end(self, request: LlmRequest, reason: FinishReason) -> Response:
        request.finish = reason
        self._store(request, request.prompt + request.generated[:-1])
        self._give_back(request)
        return request.response()

    def _fail(self, request: LlmRequest, message: str) -> Response:
        self._give_back(request)
        return Response(request.client_id, error=message)

    def _fail_all(self, responses: list[Response], message: str) -> None:
        responses += [self._fail(request, message) for request in self.active.values()]
        self.active.clear()

    def _store(self, request: LlmRequest, tokens: list[int]) -> None:
        if not (self.limits.is_reusing and request.blocks):
            return
        size = self.pool.tokens_per_block
        num_full = min(len(tokens), request.num_computed) // size
        keys = block_keys(request.reuse_root, tokens[: num_full * size], size)
        for index in range(request.num_stored, num_full):
            self.pool.store(request.blocks[index], keys[index])
        request.num_stored = max(request.num_stored, num_full)

    def _give_back(self, request: LlmRequest) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
