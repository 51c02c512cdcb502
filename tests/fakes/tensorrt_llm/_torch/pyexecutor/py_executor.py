"""The engine loop: accepts requests, runs iterations, sends results.

One thread. It calls `respond` and `report` with its results after each iteration.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorrt_llm._torch.pyexecutor.generation import Generation
from tensorrt_llm._torch.pyexecutor.guides import TokenGuide, texts_of
from tensorrt_llm._torch.pyexecutor.iteration_stats import iteration_stats
from tensorrt_llm._torch.pyexecutor.kv_cache_manager import KvCacheManager
from tensorrt_llm._torch.pyexecutor.llm_request import (
    FinishReason,
    LlmRequest,
    deduce_max_tokens,
)
from tensorrt_llm._torch.pyexecutor.response import Response
from tensorrt_llm._torch.pyexecutor.sampler import DeviceAssertError
from tensorrt_llm._torch.pyexecutor.scheduler import Scheduled, StepScheduler
from tensorrt_llm.executor.errors import CppExecutorError, RequestError
from tensorrt_llm.executor.request import GenerationRequest
from tensorrt_llm.fake_control import Settings
from tensorrt_llm.llmapi.limits import EngineLimits

Inbox = list[GenerationRequest | int]


class PyExecutor:
    """An engine, started by its constructor."""

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
        self._scheduler = StepScheduler(
            self.pool,
            policy=limits.policy,
            max_num_tokens=limits.max_num_tokens,
            is_chunked=limits.is_chunked,
            is_reusing=limits.is_reusing,
            max_tokens_per_decode=1 + limits.max_draft_len,
        )
        self._generation = Generation(limits, settings, self.pool)
        self._inbox: Inbox = []
        self._strikes: deque[str] = deque()
        self._turns_allowed = 0
        self._is_stuck = False
        self._is_stopping = False
        self._next_at_s = 0.0
        self._stopped = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="fake-engine-loop", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, item: GenerationRequest | int) -> None:
        """Queue a request, or the id of one to cancel. Never blocks or rejects; the queue is
        unbounded."""
        with self._changed:
            self._inbox.append(item)
            self._changed.notify_all()

    def strike(self, fault: str) -> None:
        """Inject a fault into the next iteration, and run one even if idle."""
        with self._changed:
            self._strikes.append(fault)
            self._changed.notify_all()

    def set_paused(self, is_paused: bool) -> None:
        with self._changed:
            self.settings.is_paused = is_paused
            self._changed.notify_all()

    def run_turns(self, count: int, timeout_s: float) -> None:
        """Allow `count` iterations and wait until they have ended."""
        with self._changed:
            if not self.settings.is_paused:
                raise RuntimeError("only a paused engine is stepped")
            self._turns_allowed += count
            last = self.iteration + self._turns_allowed
            self._changed.notify_all()
        self.wait_for_iteration(last, timeout_s)

    def wait_for_iteration(self, iteration: int, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.iteration >= iteration, timeout_s):
                raise TimeoutError(f"iteration {iteration} did not end within {timeout_s} s")

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop; its requests get no response."""
        with self._changed:
            self._is_stopping = True
            self._stopped.set()
            self.released.set()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _may_turn(self) -> bool:
        if self._is_stopping or self._strikes:
            return True
        if self.settings.is_paused:
            return self._turns_allowed > 0
        return bool(self._inbox) or (not self._is_stuck and bool(self.waiting or self.active))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_turn)
                if self._is_stopping:
                    return
                inbox, self._inbox = self._inbox, []
            if not self._turn(inbox):
                return
            with self._changed:
                self.iteration += 1
                self._turns_allowed = max(0, self._turns_allowed - 1)
                self._changed.notify_all()

    def _turn(self, inbox: Inbox) -> bool:
        """Run one iteration; return False if it was the last."""
        started_at_s = time.perf_counter()
        responses: list[Response] = []
        faults = self._faults_of_turn()
        num_new = self._take_in(inbox, responses, faults)
        if not self._survives(faults, responses):
            return False
        step = self._scheduler.schedule(self.active.values())
        self._is_stuck = step.is_empty and not responses
        if not step.is_empty:
            self._take_time()
            try:
                self._generation.run(step, self.iteration + 1, responses)
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
        if self.limits.has_stats and self.settings.has_stats and not step.is_empty:
            self._say(step, started_at_s, num_new, responses)
        return True

    def _survives(self, faults: set[str], responses: list[Response]) -> bool:
        """Apply the faults; return False if the loop is over."""
        if "kill" in faults:
            return False
        if "hang" in faults:
            self.released.wait()
            self.released.clear()
        if "fatal" in faults:
            self._respond([self._fatal(request_id) for request_id in self._everyone()])
            return False
        if "fail_all" in faults:
            self._fail_all(responses)
        return True

    def _faults_of_turn(self) -> set[str]:
        settings, number = self.settings, self.iteration + 1
        faults = {
            name
            for name, at in (
                ("kill", settings.kill_loop_at),
                ("fatal", settings.fatal_at),
                ("hang", settings.hang_at),
                ("fail_all", settings.fail_all_at),
            )
            if at == number
        }
        while self._strikes:
            faults.add(self._strikes.popleft())
        return faults

    def _take_in(self, inbox: Inbox, responses: list[Response], faults: set[str]) -> int:
        """Drain the inbox into the waiting queue, cancel, activate; return the number activated."""
        cancelled: list[int] = []
        for item in inbox:
            if isinstance(item, int):
                cancelled.append(item)
            else:
                self._receive(item, responses, faults)
        for request_id in cancelled:
            # A cancelled request that waits never gets a response.
            if self.waiting.pop(request_id, None) is None and request_id in self.active:
                request = self.active[request_id]
                responses.append(self._generation.end(request, FinishReason.CANCELLED))
                del self.active[request_id]
        num_new = 0
        while self.waiting and len(self.active) < self.limits.max_batch_size:
            request_id = next(iter(self.waiting))
            self.active[request_id] = self.waiting.pop(request_id)
            num_new += 1
        return num_new

    def _receive(
        self, item: GenerationRequest, responses: list[Response], faults: set[str]
    ) -> None:
        try:
            self.waiting[item.id] = self._admit(item)
        except FileNotFoundError as error:
            # The worker does not catch this: it ends, and only the next submission reveals it.
            self._respond([Response(0, [], is_final=True, error=error)])
            faults.add("kill")
        except (RequestError, RuntimeError, ValueError, TypeError, LookupError) as error:
            responses.append(Response(item.id, [], is_final=True, error=str(error)))
        tokens = item.prompt_token_ids
        for fault, token in (
            ("kill", self.settings.kill_loop_token),
            ("fatal", self.settings.fatal_token),
            ("hang", self.settings.hang_token),
        ):
            if token >= 0 and token in tokens:
                faults.add(fault)

    def _admit(self, item: GenerationRequest) -> LlmRequest:
        """Validate as the worker does. Raises RequestError, or an error that becomes one, for a
        rejection."""
        limits, params = self.limits, item.sampling_params
        prompt = item.prompt_token_ids
        max_tokens = deduce_max_tokens(item, limits.max_seq_len)
        if min(prompt) < 0 or max(prompt) >= limits.model.vocab_size:
            raise RequestError(f"Token ID out of range (vocab size {limits.model.vocab_size})")
        if item.lora_request is not None and not limits.has_lora:
            raise RequestError("LoRA is not enabled")
        if item.lora_request is not None and not Path(item.lora_request.lora_path).exists():
            raise FileNotFoundError(item.lora_request.lora_path)
        request = LlmRequest(item, max_tokens)
        if request.bias is not None:
            request.bias = limits.bias_of(request.bias)
        if params.guided_decoding is not None:
            if limits.guide_tokenizer is None:
                raise RequestError("Guided decoding is not enabled: set guided_decoding_backend")
            texts = self._texts_of(params.guided_decoding, limits.guide_tokenizer)
            request.guide = TokenGuide(texts, request.end_id)
            request.is_plain = False
        return request

    def _texts_of(self, guide: Any, tokenizer: Any) -> list[list[int]]:
        try:
            return [tokenizer.encode(text) for text in texts_of(guide)]
        except ValueError as error:
            reason = self.settings.guided_error or str(error)
            raise RequestError(f"Guided decoding error: {reason}") from error

    def _everyone(self) -> list[int]:
        return [*self.active, *self.waiting]

    def _fatal(self, request_id: int) -> Response:
        error = CppExecutorError("the executor failed")
        return Response(request_id, [], is_final=True, error=error)

    def _fail_all(self, responses: list[Response], message: str = "") -> None:
        """Fail all active requests, as for an error that cannot be attributed to one."""
        for request in list(self.active.values()):
            responses.append(self._generation.fail(request, message))
            del self.active[request.client_id]

    def _take_time(self) -> None:
        """Wait for `step_s`, counted from the end of the previous iteration while work
        continues."""
        step_s = self.settings.step_s
        if step_s <= 0.0:
            return
        now_s = time.perf_counter()
        self._next_at_s = max(now_s, self._next_at_s + step_s)
        if self._next_at_s <= now_s or self._next_at_s > now_s + step_s:
            self._next_at_s = now_s + step_s
        self._stopped.wait(self._next_at_s - time.perf_counter())

    def _say(
        self, step: Scheduled, started_at_s: float, num_new: int, responses: list[Response]
    ) -> None:
        self._report(
            iteration_stats(
                self,
                step,
                latency_ms=(time.perf_counter() - started_at_s) * 1e3,
                num_new=num_new,
                num_completed=sum(response.is_final for response in responses),
            )
        )
