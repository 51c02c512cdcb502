"""A front without its transport: opens requests and feeds their streams from the engine's events.

Owns the live requests and the calls of the engine port. Does not know gRPC or protobuf. Everything
runs on one event loop; the engine's callbacks (`on_*`) neither block nor raise.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock.scheduler.events import Queued, StepEvents
from penstock.scheduler.request import FinishReason
from penstock.scheduler.state import RequestState
from penstock.server.front.accounts import Accounts, RequestAccount
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, Refusal, refuse
from penstock.server.front.event_router import EventRouter, FrontCounters
from penstock.server.front.generation import Generation
from penstock.server.front.kept_requests import KeptResults, result_of, submit
from penstock.server.front.limits import Limits
from penstock.server.front.live_output import output_texts
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.prompt_tokens import Prompts, TextQuotas
from penstock.server.front.queue_gate import QueueGate
from penstock.server.front.replay import Replays
from penstock.server.front.request_table import RequestTable, view_of
from penstock.server.front.submission import CallTimes, submission_for
from penstock.server.front.watched_write import SharedWriter
from penstock.server.link.frames import EngineHello
from penstock.server.link.ports import EnginePort, EngineUnavailable
from penstock.server.observe.frames import FrontView
from penstock.server.observe.request_record import RequestRecorder
from penstock.server.tenants import NO_TENANT, engine_request_id, new_request_id
from penstock.server.text.model_text import ModelText

log = logging.getLogger(__name__)
_SEED_BITS = 53
"""Bits of the largest integer that JSON and JavaScript represent exactly."""


class Front:
    """The live requests of one front process and their path to the engine.

    `port`, `gate` and `prompts.quotas` may be set after construction, before the first request.
    `clock` is the engine's. `ready_time_s`: when the engine last connected, seconds since 1970.
    `shared_writers`: writers that serve several requests each, added by the task that runs them.
    `recorder` notes every ended request; with `is_tracing` these belong to traces.
    """

    def __init__(
        self,
        text: ModelText,
        config: FrontConfig,
        *,
        port: EnginePort | None = None,
        clock: Callable[[], float] = time.monotonic,
        recorder: RequestRecorder | None = None,
        is_tracing: bool = False,
    ) -> None:
        self.text = text
        self.prompts = Prompts(text, TextQuotas(clock=clock))
        self.config = config
        self.clock = clock
        self.port = port
        self.counters = FrontCounters()
        self.gate = QueueGate()
        self.table = RequestTable(config.front_id, config.max_live_requests)
        self.hello: EngineHello | None = None
        self.limits: Limits | None = None
        self.ready_time_s: float | None = None
        self.is_draining = False
        self.shared_writers: set[SharedWriter[Any]] = set()
        self.accounts = Accounts(
            recorder,
            is_tracing=is_tracing,
            front_id=config.front_id,
            has_content=config.has_content,
        )
        self._dispatcher = EventRouter(
            self.table,
            self.counters,
            max_backlog_tokens=config.max_backlog_tokens,
            cancel=self._cancel_keys,
            on_late_event=self.accounts.on_late_event,
        )
        self.results = KeptResults(config.max_resume_bytes)
        self.attaching: dict[LiveRequest, deque[StepEvents]] = {}
        """Requests that are being attached, and their events so far."""
        self.replays = Replays(
            config, self.table, lambda: self.port, clock, note_sent=self._note_sent
        )

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.text.files.name

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the model, its own first."""
        return (self.model, *self.config.model_aliases)

    @property
    def is_engine_up(self) -> bool:
        """True between an engine's hello and its loss."""
        return self.limits is not None and self.port is not None and self.port.is_up

    @property
    def num_backlog_tokens(self) -> int:
        """Output tokens that readers have not taken."""
        return sum(request.stream.num_backlog_tokens for request in self.table)

    @property
    def num_detached(self) -> int:
        """Requests without a reader."""
        return sum(request.is_detached for request in self.table)

    @property
    def newest_place(self) -> Queued | None:
        """The queue position of the last request that the current engine queued for this front."""
        return self._dispatcher.newest_place

    def live_views(self) -> Iterator[FrontView]:
        """Yield a view of every live request, for operators.

        Views are made one by one, so that other tasks may run in between; requests released by then
        are skipped.
        """
        for request in self.table:
            if self.table.get(request.request_id, request.tenant) is request:
                yield view_of(request, self.config.front_id)

    def current_limits(self) -> Limits:
        """Return the bounds in force. Raises RequestError if the front accepts nothing now."""
        if self.is_draining:
            raise refuse(ErrorReason.DRAINING)
        if self.limits is None or not self.is_engine_up:
            raise refuse(ErrorReason.ENGINE_DOWN)
        return self.limits

    async def open(
        self, generation: Generation, times: CallTimes, account: RequestAccount | None = None
    ) -> LiveRequest:
        """Open a request; the caller must `release` it in any case.

        `account`: the account of this request, which its opener closes.

        Raises RequestError for every refusal that does not need the engine; other refusals arrive
        on the stream.
        """
        request = self.reserve(generation, times, account)
        try:
            await self.start(request, times)
        except BaseException:
            self.release(request)
            raise
        return request

    def reserve(
        self, generation: Generation, times: CallTimes, account: RequestAccount | None = None
    ) -> LiveRequest:
        """Register the request here, without sending it to the engine: the first half of `open`.

        Raises RequestError.
        """
        self.current_limits()
        if times.call_deadline_s <= self.clock():
            raise refuse(
                ErrorReason.DEADLINE_EXCEEDED, state="PENDING", phase="queue", deadline="grpc"
            )
        kept = generation.resumption
        if kept is not None and len(kept.message) > self.config.max_resume_bytes:
            raise refuse(ErrorReason.QUEUE_FULL, "the request is too large to be kept for Resume")
        self.gate.check(
            self.hello,
            generation.sampling.num_outputs,
            tenant=generation.tenant,
            priority=generation.urgency.priority,
        )
        request_id = generation.request_id or ("" if account is None else account.request_id)
        request = LiveRequest(request_id or new_request_id(), generation, times.arrival_s)
        if self.table.is_full:
            self._end_unread()
        self.table.add(request)
        if account is not None:
            account.live = request
        return request

    async def start(self, request: LiveRequest, times: CallTimes) -> None:
        """Tokenise the request and submit it to the engine: the second half of `open`.

        A request that was cancelled or lost meanwhile has its end in its stream. Raises
        RequestError.
        """
        if request.stream.is_closed:
            return
        if self.is_draining:
            raise refuse(ErrorReason.DRAINING)
        await self._submit(request, times)

    def release(self, request: LiveRequest) -> None:
        """Remove the request from this front; the engine drops what still runs. Idempotent."""
        self.release_all((request,))

    def release_all(self, requests: Iterable[LiveRequest]) -> None:
        """Release each request, with one message to the engine for all of them.

        A resumable request is only parked: it stays until it ends.
        """
        live_keys: list[int] = []
        unread: list[str] = []
        for request in requests:
            if request.is_released or request.is_detached:
                continue
            is_arriving = self.attaching.pop(request, None) is not None
            if request.generation.resumption is not None and (request.outputs or is_arriving):
                unread.append(engine_request_id(request.tenant, request.request_id))
                if request.stream.is_closed:
                    self._keep_result(request)
                    self._remove(request)
                elif is_arriving:  # its stream is not complete here
                    self._remove(request)
                else:
                    self._park(request)
                continue
            self._remove(request)
            live_keys += request.live_keys
        self._cancel_keys(tuple(live_keys), FinishReason.CANCELLED)
        if unread and self.port is not None:
            self.port.detach(tuple(unread))

    def detach(self, request: LiveRequest, refusal: Refusal) -> None:
        """Remove a request that continues elsewhere; its reader here gets `refusal`."""
        request.fail(refusal, self.clock())
        self._remove(request)

    def apply_history(self, request: LiveRequest, events: StepEvents) -> None:
        """Add kept events to the stream of a started request of `attaching`.

        Events that the engine sends meanwhile are not routed to the request yet.
        """
        self.table.add_outputs(request)
        self._dispatcher.dispatch(events, events.at_s, is_history=True)
        self.table.remove_outputs(request)

    def finish_attach(self, request: LiveRequest, is_same_engine: bool) -> None:
        """Make a request of `attaching` live here: its stream is complete.

        `is_same_engine`: the engine of its history is still connected. Otherwise it is submitted to
        the next engine.
        """
        del self.attaching[request]
        self.table.add_outputs(request)
        if request.stream.is_closed:
            return
        if is_same_engine:
            self._note_sent(request)
        else:
            request.suspend(self.clock())
            self.replays.adopt(request, self.limits)

    async def cancel(self, request_id: str, tenant: str = NO_TENANT) -> RequestState:
        """Cancel a live request of `tenant`, here or on another front; return its state.

        Raises RequestError if it is not found or no engine is connected.
        """
        request = self.table.get(request_id, tenant)
        if request is not None and request not in self.attaching:
            return self.cancel_here(request)
        if request is not None:
            # Only the engine knows its state; if the engine is lost first, this flag counts.
            request.is_cancelled = True
        if self.port is None:
            raise refuse(ErrorReason.ENGINE_DOWN)
        try:
            known = await self.port.cancel_by_id(engine_request_id(tenant, request_id))
        except EngineUnavailable:
            if request is not None:
                return request.state
            raise refuse(ErrorReason.ENGINE_DOWN) from None
        if known is None:
            raise refuse(ErrorReason.REQUEST_NOT_FOUND)
        return known

    def cancel_here(self, request: LiveRequest) -> RequestState:
        """Cancel a live request of this front; return its state. It finishes as CANCELLED."""
        state = request.state
        if self.replays.cancel(request):
            return state
        if request.outputs:
            # The engine may be lost before it confirms.
            request.is_cancelled = True
            self._cancel_keys(request.live_keys, FinishReason.CANCELLED)
        else:
            request.cancel_unsubmitted(self.model, self.clock())
        return state

    def begin_drain(self) -> None:
        """Accept nothing new from now on. Writers without requests may end."""
        self.is_draining = True
        for writer in self.shared_writers:
            writer.wake()

    def on_hello(self, hello: EngineHello) -> None:
        """Handle a new connection. Requests that are live here belonged to an earlier engine.

        If the epoch is unchanged, only the connection had been lost.
        """
        self.on_lost()
        is_same_engine = self.hello is not None and self.hello.epoch == hello.epoch
        self.hello = hello
        self.ready_time_s = time.time()
        self.limits = Limits.of(self.config, hello.executor, self.text.files.vocab_size)
        # The tokenizer may be another model's: an unknown sampled id must not end a stream.
        self.text.detokenizer.cover(hello.executor.vocab_size)
        num_known = self.text.files.tokenizer.get_vocab_size(True)
        if num_known > self.limits.vocab_size:
            log.warning(
                "the tokenizer of %s has %d tokens and the model %d: prompts with one of the"
                " others are refused",
                self.text.files.path,
                num_known,
                self.limits.vocab_size,
            )
        self.replays.resubmit(self.limits, is_same_engine=is_same_engine)
        if self.port is not None:
            for request in self.table:
                self._keep_result(request)  # for readers that have not reached the end
            with contextlib.suppress(EngineUnavailable):  # the next engine gets them
                for result in self.results:
                    self.port.submit_kept((), result)

    def on_events(self, events: StepEvents) -> None:
        """Handle the events of one step."""
        for waiting in self.attaching.values():
            waiting.append(events)
        self._dispatcher.dispatch(events, self.clock())

    def on_lost(self) -> None:
        """Make every request wait for the next engine: the current one is lost."""
        self.accounts.settle()
        self._dispatcher.newest_place = None
        # Requests being attached are incomplete: they are submitted to the next engine later.
        waits = [one for one in self.table if one not in self.attaching or not self.replays.are_on]
        self.replays.lose(waits)

    def on_given_up(self) -> None:
        """End the requests that wait for an engine: no further engine will start."""
        self.replays.give_up()

    def fail_all(self, refusal: Refusal) -> None:
        """End every live request with `refusal`."""
        now_s = self.clock()
        for request in self.table:
            request.fail(refusal, now_s)

    def leave_resumable(self, refusal: Refusal) -> None:
        """Leave resumable requests to the engine, because this front is about to stop.

        Their readers get `refusal`.
        """
        left = [
            request
            for request in self.table
            if request.generation.resumption is not None and request.is_at_engine
        ]
        for request in left:
            self.detach(request, refusal)
        if left and self.port is not None:
            self.port.detach(tuple(engine_request_id(one.tenant, one.request_id) for one in left))

    def cut_stalled(self) -> None:
        """Disconnect every reader that blocks one write for over `max_reader_stall_s`."""
        self._dispatcher.cut_stalled(
            self.shared_writers, self.config.max_reader_stall_s, self.clock()
        )

    def known_limits(self) -> Limits:
        """Return the limits of the engine, or of a lost one while replays are on. Raises
        RequestError.
        """
        if self.limits is None or not (self.is_engine_up or self.replays.are_on):
            raise refuse(ErrorReason.ENGINE_DOWN)
        return self.limits

    async def _submit(
        self, request: LiveRequest, times: CallTimes, *, is_again: bool = False
    ) -> None:
        generation = request.generation
        began_with = self.known_limits()
        prompt, prompt_text = await self.prompts.tokenise(
            generation, began_with, is_replay=is_again
        )
        if request.stream.is_closed:  # cancelled, or the engine was lost, meanwhile
            return
        limits = self.known_limits()
        if limits.block_size != began_with.block_size:
            # Another engine has connected; the prompt was hashed for the previous one.
            await self._submit(request, times, is_again=True)
            return
        num_outputs = generation.sampling.num_outputs
        num_tokens = num_outputs * len(prompt.ids)
        self.gate.check(
            self.hello if self.is_engine_up else None,
            num_outputs,
            num_tokens,
            tenant=generation.tenant,
            priority=generation.urgency.priority,
        )
        seed = generation.sampling.seed
        submission = submission_for(
            generation,
            prompt,
            limits=limits,
            times=times,
            request_id=request.request_id,
            keys=self.table.new_keys(generation.sampling.num_outputs),
            seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
            eos_ids=self.text.files.eos_ids,
        )
        request.start(
            submission,
            output_texts(generation, self.text, submission.specs[0].stop_ids),
            model=self.model,
            prompt_text=prompt_text,
            now_s=self.clock(),
            has_content=self.accounts.has_content,
        )
        self._send(request)

    def _send(self, request: LiveRequest) -> None:
        if self.port is None:
            raise refuse(ErrorReason.ENGINE_DOWN)
        self.table.add_outputs(request)
        try:
            submit(self.port, request, request.specs)
        except EngineUnavailable:
            if not self.replays.are_on:
                raise refuse(ErrorReason.ENGINE_DOWN) from None
            # The engine was lost while the request was prepared: the next one gets it.
            self.replays.suspend(request)
            return
        self._note_sent(request)
        self.counters.num_submitted += 1
        # An engine reports a refusal with its next step. A client can retry only before the first
        # message, so the first message waits a little for the engine's first event.
        request.head.accept_after(self.config.acceptance_delay_s, asyncio.get_running_loop())

    def _end_unread(self) -> None:
        """Free places in a full front: end requests that have ended and are not read."""
        now_s = self.clock()
        unread = self.table.unread(now_s)
        for request in unread:
            self._dispatcher.cut(request, "ended and unread in a full front", now_s)
        self.release_all(unread)

    def _remove(self, request: LiveRequest) -> None:
        """Remove the request from this front. Idempotent."""
        if request.is_released:
            return
        request.is_released = True
        self.replays.forget(request)
        if request.is_at_engine:
            num_queued = request.num_queued
            self.gate.note_sent(-num_queued, -num_queued * request.num_prompt_tokens)
        request.head.stop_waiting()
        request.stream.close()
        self.table.remove(request)

    def _park(self, request: LiveRequest) -> None:
        """Park a request without a reader: the engine keeps its events, this front its replay."""
        request.is_detached = True
        stream = request.stream

        def pass_over() -> None:
            stream.take_due()
            if stream.is_closed:
                self._keep_result(request)
                self._remove(request)

        stream.attach(pass_over)
        pass_over()

    def _keep_result(self, request: LiveRequest) -> None:
        result = result_of(request)
        if result is not None:
            self.results.add(result)

    def _note_sent(self, request: LiveRequest) -> None:
        """Record that the outputs of a submitted request wait in the engine's queue."""
        request.is_at_engine = True
        num_queued = request.num_queued
        self.gate.note_sent(num_queued, num_queued * request.num_prompt_tokens)

    def _cancel_keys(self, keys: tuple[int, ...], reason: FinishReason) -> None:
        if keys and self.port is not None:
            self.port.cancel(keys, reason)
