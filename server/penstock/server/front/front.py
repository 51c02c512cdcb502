"""The front (gRPC server process), independent of its transport: opens requests, and passes the
engine's events to their streams.

Owns the live requests and calls the engine through an `EnginePort`. Uses neither gRPC nor protobuf.
All code runs on one event loop; the engine's callbacks (`on_*`) neither block nor raise.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from penstock.scheduler.events import Failed, Queued, StepEvents
from penstock.scheduler.request import FailureReason, FinishReason
from penstock.scheduler.state import RequestState
from penstock.server.front.accounts import Accounts, RequestAccount
from penstock.server.front.admission_estimate import AdmissionEstimate
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, Failure, invalid_field, request_error
from penstock.server.front.event_router import EventRouter, FrontCounters
from penstock.server.front.generation import GenerationSpec
from penstock.server.front.kept_requests import Attachment, KeptResults, result_of, submit
from penstock.server.front.limits import Limits
from penstock.server.front.live_output import output_texts
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.prompt_tokens import Prompts, TextQuotas
from penstock.server.front.replay import Replays
from penstock.server.front.request_table import RequestTable, view_of
from penstock.server.front.submission import CallTimes, submission_for
from penstock.server.front.watched_write import SharedWriter
from penstock.server.ipc.frames import EngineHello
from penstock.server.ipc.ports import EnginePort, EngineUnavailable
from penstock.server.observe.frames import FrontRequestView
from penstock.server.observe.request_record import RequestRecorder
from penstock.server.tenants import NO_TENANT, engine_request_id, new_request_id
from penstock.server.text.model_text import ModelText

logger = logging.getLogger(__name__)
_SUPERSEDED: Final = Failure(reason=ErrorReason.STREAM_SUPERSEDED)
_SEED_BITS = 53
"""Number of bits of a random seed, which JavaScript must be able to represent exactly."""


class Front:
    """The live requests of one front process, and their connection to the engine.

    `port`, `admission` and `prompts.quotas` may be set after construction, before the first
    request. `clock` is the engine's clock. `ready_time_s` is the time when the engine last
    connected, in seconds since 1970; None before the first connection. `shared_writers` are writers
    that each serve several requests; the task that runs a writer adds it. `recorder` records each
    ended request; if `is_tracing`, requests get trace ids.
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
        self.admission = AdmissionEstimate()
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
        self._router = EventRouter(
            self.table,
            self.counters,
            max_backlog_tokens=config.max_backlog_tokens,
            cancel=self._cancel_keys,
            on_late_event=self.accounts.on_late_event,
        )
        self.results = KeptResults(config.max_resume_bytes)
        self.attaching: dict[LiveRequest, Attachment] = {}
        """Requests that are being attached."""
        self.replays = Replays(
            config, self.table, lambda: self.port, clock, note_sent=self._note_sent
        )

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.text.files.name

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the model; the first is `model`."""
        return (self.model, *self.config.model_aliases)

    @property
    def is_engine_up(self) -> bool:
        """True while an engine is connected: from its first frame (hello) until the loss of the
        connection."""
        return self.limits is not None and self.port is not None and self.port.is_up

    @property
    def num_backlog_tokens(self) -> int:
        """Number of output tokens in the backlogs of all live requests."""
        return sum(request.stream.num_backlog_tokens for request in self.table)

    @property
    def num_detached(self) -> int:
        """Number of requests that continue without a reader."""
        return sum(request.is_detached for request in self.table)

    @property
    def newest_queue_position(self) -> Queued | None:
        """The queue position of the request that the current engine has queued most recently for
        this front; None if there is none."""
        return self._router.newest_queue_position

    def request_views(self) -> Iterator[FrontRequestView]:
        """Yield a view of each live request, for operators.

        Views are created one by one, so that other tasks may run in between. Requests that are
        removed meanwhile are skipped.
        """
        for request in self.table:
            if self.table.get(request.request_id, request.tenant) is request:
                yield view_of(request, self.config.front_id)

    def current_limits(self) -> Limits:
        """Return the limits of the connected engine. Raises RequestError (DRAINING or ENGINE_DOWN)
        if the front accepts no requests now."""
        if self.is_draining:
            raise request_error(ErrorReason.DRAINING)
        if self.limits is None or not self.is_engine_up:
            raise request_error(ErrorReason.ENGINE_DOWN)
        return self.limits

    async def open(
        self, generation: GenerationSpec, times: CallTimes, account: RequestAccount | None = None
    ) -> LiveRequest:
        """Open a request and return it. The caller must pass it to `release` in all cases.

        `account` holds the data for the record of the request; the caller closes it.

        Raises RequestError for each error that is detected before the request is submitted to
        the engine. Later errors are delivered on the stream.
        """
        request = self.reserve(generation, times, account)
        try:
            await self.start(request, times)
        except BaseException:
            self.release(request)
            raise
        return request

    def reserve(
        self, generation: GenerationSpec, times: CallTimes, account: RequestAccount | None = None
    ) -> LiveRequest:
        """Register the request in this front without submitting it to the engine, and return it.

        This is the first half of `open`. Raises RequestError if the request is rejected.
        """
        self.current_limits()
        if times.call_deadline_s <= self.clock():
            raise request_error(
                ErrorReason.DEADLINE_EXCEEDED, state="PENDING", phase="queue", deadline="grpc"
            )
        kept = generation.resumption
        max_bytes = self.config.max_resume_bytes
        if kept is not None and len(kept.message) > max_bytes:
            raise invalid_field(
                "resume_timeout", f"must not be set: the request has more than {max_bytes} bytes"
            )
        self.admission.check(
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
            account.request = request
        return request

    async def start(self, request: LiveRequest, times: CallTimes) -> None:
        """Tokenise the request and submit it to the engine. This is the second half of `open`.

        Does nothing if the request has ended since `reserve`; its end is then in its stream.
        Raises RequestError if the request is rejected.
        """
        if request.stream.is_closed:
            return
        if self.is_draining:
            raise request_error(ErrorReason.DRAINING)
        await self._submit(request, times)

    def release(self, request: LiveRequest) -> None:
        """Remove a request that its caller no longer reads. Idempotent.

        The engine cancels the outputs that still run. A resumable request that has not ended is
        detached instead.
        """
        self.release_all((request,))

    def release_all(self, requests: Iterable[LiveRequest]) -> None:
        """Release requests (see `release`), with at most one cancel frame and one detach frame to
        the engine.

        A detached request stays in this front until it ends.
        """
        live_keys: list[int] = []
        unread: list[str] = []
        for request in requests:
            if request.is_released or request.is_detached:
                continue
            is_attaching = self.attaching.pop(request, None) is not None
            if request.generation.resumption is not None and (request.outputs or is_attaching):
                unread.append(engine_request_id(request.tenant, request.request_id))
                if request.stream.is_closed:
                    self._keep_result(request)
                    self._remove(request)
                elif is_attaching:  # Its stream is not complete here.
                    self._remove(request)
                else:
                    self._detach(request)
                continue
            self._remove(request)
            live_keys += request.live_keys
        self._cancel_keys(tuple(live_keys), FinishReason.CANCELLED)
        if unread and self.port is not None:
            self.port.detach(tuple(unread))

    def supersede(self, request: LiveRequest) -> None:
        """Remove a request whose stream was taken over by another front or call.

        The call that reads it here ends immediately, even if the request has ended or if a write to
        the client is blocked.
        """
        request.phases.stop(self.clock())
        request.stream.abort(_SUPERSEDED)
        self._remove(request)

    def apply_history(self, request: LiveRequest, events: StepEvents) -> None:
        """Add earlier `events` to the stream of a request that is being attached (taken over).

        New events from the engine are not routed to the request yet.
        """
        self.table.add_outputs(request)
        self._router.dispatch(events, events.at_s, is_history=True)
        self.table.remove_outputs(request)

    def finish_attach(self, request: LiveRequest, is_same_engine: bool) -> None:
        """Complete an attach: from now on the request is live on this front, with a complete
        stream.

        `is_same_engine` is True if the engine from which it was taken over is still connected.
        Otherwise the request is submitted to the engine that is connected now, or as soon as one
        is; if the request has ended, only its result is submitted.
        """
        del self.attaching[request]
        self.table.add_outputs(request)
        if is_same_engine:
            self._note_sent(request)
            return
        if not request.stream.is_closed:
            request.suspend(self.clock())
        self.replays.submit_attached(request, self.limits)

    async def cancel(self, request_id: str, tenant: str = NO_TENANT) -> RequestState:
        """Cancel a live request of `tenant`, on this or another front, and return the state that it
        had.

        Raises RequestError if it is not found, or if it is not on this front and no engine is
        connected.
        """
        request = self.table.get(request_id, tenant)
        if request is not None and request not in self.attaching:
            return self.cancel_here(request)
        if request is not None:
            # The engine has the state. If the connection is lost before the response, the flag
            # still takes effect.
            request.is_cancelled = True
        if self.port is None:
            raise request_error(ErrorReason.ENGINE_DOWN)
        try:
            known = await self.port.cancel_by_id(engine_request_id(tenant, request_id))
        except EngineUnavailable:
            if request is not None:
                return request.state
            raise request_error(ErrorReason.ENGINE_DOWN) from None
        if known is None:
            raise request_error(ErrorReason.REQUEST_NOT_FOUND)
        return known

    def cancel_here(self, request: LiveRequest) -> RequestState:
        """Cancel a live request of this front and return the state that it had. The request then
        ends as CANCELLED."""
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
        """Accept no new requests from now on. Wakes the shared writers, so that writers without
        requests end."""
        self.is_draining = True
        for writer in self.shared_writers:
            writer.wake()

    def on_hello(self, hello: EngineHello) -> None:
        """Handle a new connection: submit the live requests, and the results of ended resumable
        requests, again.

        If the epoch (the number of the engine start) is unchanged, only the connection had been
        lost.
        """
        self.on_lost()
        is_same_engine = self.hello is not None and self.hello.epoch == hello.epoch
        self.hello = hello
        self.ready_time_s = time.time()
        self.limits = Limits.from_config(self.config, hello.executor, self.text.files.vocab_size)
        # The tokenizer may belong to another model: an unknown id in the output must not end a
        # stream.
        self.text.detokenizer.extend_vocabulary(hello.executor.vocab_size)
        num_known = self.text.files.tokenizer.get_vocab_size(True)
        if num_known > self.limits.vocab_size:
            logger.warning(
                "the tokenizer of %s has %d tokens and the model %d: prompts with one of the"
                " others are rejected",
                self.text.files.path,
                num_known,
                self.limits.vocab_size,
            )
        self.replays.resubmit(self.limits, is_same_engine=is_same_engine)
        if self.port is not None:
            for request in self.table:
                # Keep the results whose readers have not reached the end of the stream, for the
                # next engine.
                self._keep_result(request)
            with contextlib.suppress(EngineUnavailable):  # the next engine gets them
                for result in self.results:
                    self.port.submit((), result)

    def on_events(self, events: StepEvents) -> None:
        """Pass the events of one engine step to the streams of their requests, and refund the
        quotas of displaced requests."""
        for attachment in self.attaching.values():
            attachment.events.append(events)
        self._refund_displaced(events)
        self._router.dispatch(events, self.clock())

    def on_detached(self, name: str, keys: tuple[int, ...]) -> None:
        """Remove a request that another front has taken over, or that the engine has dropped. If a
        client reads it here, its call ends with STREAM_SUPERSEDED.

        `name` is the engine's id of the request, and `keys` are the keys of its outputs.
        """
        self.results.forget(name, keys)
        for request in {output.request for key in keys if (output := self.table.output(key))}:
            self.supersede(request)
        for request, attachment in tuple(self.attaching.items()):
            if attachment.keys == keys:
                self.supersede(request)

    def on_lost(self) -> None:
        """Handle the loss of the connection: suspend requests until the next engine connects, or
        fail them if replays are off. Also writes the records that wait for the engine."""
        self.accounts.flush()
        self._router.newest_queue_position = None
        # Requests that are being attached are incomplete; they are submitted to the next engine
        # later.
        waiting = [
            one for one in self.table if one not in self.attaching or not self.replays.is_enabled
        ]
        self.replays.on_engine_lost(waiting)

    def on_no_further_engine(self) -> None:
        """Fail the requests that wait for an engine with ENGINE_DOWN, because no further engine
        will be started."""
        self.replays.disable()

    def fail_all(self, failure: Failure) -> None:
        """End every live request with the error `failure`."""
        now_s = self.clock()
        for request in self.table:
            request.fail(failure, now_s)

    def detach_resumable(self, failure: Failure) -> None:
        """Detach resumable requests before this front stops; the engine keeps them.

        Their readers receive the error `failure`.
        """
        left = [
            request
            for request in self.table
            if request.generation.resumption is not None and request.is_at_engine
        ]
        for request in left:
            request.fail(failure, self.clock())
            self._remove(request)
        if left and self.port is not None:
            self.port.detach(tuple(engine_request_id(one.tenant, one.request_id) for one in left))

    def disconnect_stalled(self) -> None:
        """Disconnect each reader whose current write has been blocked for longer than
        `max_reader_stall_s`."""
        self._router.disconnect_stalled(
            self.shared_writers, self.config.max_reader_stall_s, self.clock()
        )

    def known_limits(self) -> Limits:
        """Return the limits of the connected engine, or of the last engine if replays are enabled.
        Raises RequestError (ENGINE_DOWN) if there is none."""
        if self.limits is None or not (self.is_engine_up or self.replays.is_enabled):
            raise request_error(ErrorReason.ENGINE_DOWN)
        return self.limits

    async def _submit(
        self, request: LiveRequest, times: CallTimes, *, is_again: bool = False
    ) -> None:
        generation = request.generation
        began_with = self.known_limits()
        prompt, prompt_text = await self.prompts.tokenize(
            generation, began_with, is_replay=is_again
        )
        # The request was cancelled, or the engine was lost, meanwhile.
        if request.stream.is_closed:
            return
        limits = self.known_limits()
        if limits.block_size != began_with.block_size:
            # Another engine has connected, and the prompt was hashed for the previous one.
            await self._submit(request, times, is_again=True)
            return
        num_outputs = generation.sampling.num_outputs
        num_tokens = num_outputs * len(prompt.ids)
        self.admission.check(
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
            raise request_error(ErrorReason.ENGINE_DOWN)
        self.table.add_outputs(request)
        try:
            submit(self.port, request, request.specs)
        except EngineUnavailable:
            if not self.replays.is_enabled:
                raise request_error(ErrorReason.ENGINE_DOWN) from None
            # The engine was lost while the request was prepared; the next engine will receive the
            # request.
            self.replays.suspend(request)
            return
        self._note_sent(request)
        self.counters.num_submitted += 1
        # An engine reports a rejection with its next step. A client can retry only before the first
        # message, so the first message waits briefly for the engine's first event.
        request.head.accept_after(self.config.acceptance_delay_s, asyncio.get_running_loop())

    def _refund_displaced(self, events: StepEvents) -> None:
        """Refund the quota of requests that the engine had queued and then displaced."""
        for end in events.ends:
            if not isinstance(end, Failed) or end.reason is not FailureReason.QUEUE_FULL:
                continue
            output = self.table.find_output(end.key)
            # A request that was never queued has no queue wait.
            if end.wait is not None and output is not None and output.index == 0:
                request = output.request
                self.prompts.quotas.refund(request.tenant, request.num_prompt_tokens)

    def _end_unread(self) -> None:
        """Remove ended requests that are unread (see `RequestTable.unread`), because this front is
        full."""
        now_s = self.clock()
        unread = self.table.unread(now_s)
        for request in unread:
            self._router.disconnect(request, "ended and unread in a full front", now_s)
        self.release_all(unread)

    def _remove(self, request: LiveRequest) -> None:
        """Remove the request from this front. Idempotent."""
        if request.is_released:
            return
        request.is_released = True
        self.replays.forget(request)
        if request.is_at_engine:
            num_queued = request.num_queued
            self.admission.note_sent(-num_queued, -num_queued * request.num_prompt_tokens)
        request.head.stop_waiting()
        request.stream.close()
        self.table.remove(request)

    def _detach(self, request: LiveRequest) -> None:
        """Detach a request. This front then drops the events of the request, because the engine
        keeps them, but can still replay the request."""
        request.is_detached = True
        stream = request.stream

        def drop_events() -> None:
            stream.take_due()
            if stream.is_closed:
                self._keep_result(request)
                self._remove(request)

        stream.attach(drop_events)
        drop_events()

    def _keep_result(self, request: LiveRequest) -> None:
        result = result_of(request)
        if result is not None:
            self.results.add(result)

    def _note_sent(self, request: LiveRequest) -> None:
        """Set `is_at_engine` of a submitted request, and count its outputs as waiting in the
        engine's queue."""
        request.is_at_engine = True
        num_queued = request.num_queued
        self.admission.note_sent(num_queued, num_queued * request.num_prompt_tokens)

    def _cancel_keys(self, keys: tuple[int, ...], reason: FinishReason) -> None:
        if keys and self.port is not None:
            self.port.cancel(keys, reason)
