"""One front without its wire: takes generations in, feeds their streams from the engine's news.

Owns the live requests and the conversation with the engine port. Does not know gRPC or protobuf.
Everything runs on one event loop; what the engine calls (`on_*`) neither blocks nor raises.
"""

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock.scheduler.events import Queued, StepEvents
from penstock.scheduler.request import FinishReason
from penstock.scheduler.state import RequestState
from penstock.server.front.accounts import Accounts
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, Refusal, refuse
from penstock.server.front.event_router import EventRouter, FrontCounters
from penstock.server.front.generation import Generation
from penstock.server.front.kept_requests import result_of, submit
from penstock.server.front.limits import Limits
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.output_texts import output_texts
from penstock.server.front.prompt_tokens import Prompts
from penstock.server.front.queue_gate import QueueGate
from penstock.server.front.replay import Replays
from penstock.server.front.request_account import Outcome, RequestAccount
from penstock.server.front.request_table import RequestTable
from penstock.server.front.results import Results
from penstock.server.front.shared_writer import SharedWriter
from penstock.server.front.submission import CallTimes, submission_for
from penstock.server.front.tenants import NO_TENANT, engine_request_id
from penstock.server.front.text_quota import TextQuotas
from penstock.server.front.views import view_of
from penstock.server.link.ports import EngineHello, EnginePort, EngineUnavailable
from penstock.server.link.resume_port import ResumePort
from penstock.server.telemetry.front_view import FrontView
from penstock.server.telemetry.journal import Journal
from penstock.server.text.model_text import ModelText

log = logging.getLogger(__name__)
_SEED_BITS = 53
"""A number of JSON or JavaScript holds no more."""


class Front:
    """The live requests of one front process and their way to the engine.

    `port`, `gate` and `prompts.quotas` may be set after construction, before the first request.
    `clock` is the engine's.
    `ready_time_s`: when the engine last said hello, seconds since 1970. `shared_writers`: those
    that serve several requests each; whoever runs one keeps it there. `journal`: notes every
    request that ended; with `is_tracing` they have a place in a trace.
    """

    def __init__(
        self,
        text: ModelText,
        config: FrontConfig,
        *,
        port: EnginePort | None = None,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
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
            journal,
            is_tracing=is_tracing,
            front_id=config.front_id,
            has_content=config.has_content,
        )
        self._dispatcher = EventRouter(
            self.table,
            self.counters,
            max_backlog_tokens=config.max_backlog_tokens,
            cancel=self._cancel_keys,
            on_late_end=self.accounts.on_late_end,
        )
        self.results = Results(config.max_resume_bytes)
        self.attaching: dict[LiveRequest, deque[StepEvents]] = {}
        """Requests that are brought here from the engine, and what has come of them so far."""
        self.replays = Replays(
            config, self.table, lambda: self.port, clock, note_sent=self._note_sent
        )

    @property
    def model(self) -> str:
        """The name of the one model served here."""
        return self.text.files.name

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name the model answers to, its own first."""
        return (self.model, *self.config.model_aliases)

    @property
    def is_engine_up(self) -> bool:
        """True between an engine's hello and its loss."""
        return self.limits is not None and self.port is not None and self.port.is_up

    @property
    def num_backlog_tokens(self) -> int:
        """Output that readers have not taken."""
        return sum(request.stream.num_backlog_tokens for request in self.table)

    @property
    def num_parked(self) -> int:
        """Requests that nobody reads."""
        return sum(request.is_parked for request in self.table)

    @property
    def newest_place(self) -> Queued | None:
        """What the engine that runs now said of the last request that it queued for this front."""
        return self._dispatcher.newest_place

    def live_views(self) -> Iterator[FrontView]:
        """Every request that has not been released, as operators see it.

        Each is made when it is taken, for whoever wants thousands to let others run in between;
        those that have left by then are passed over.
        """
        for request in self.table:
            if self.table.get(request.request_id, request.tenant) is request:
                yield view_of(request, self.config.front_id)

    def current_limits(self) -> Limits:
        """The bounds in force; raises RequestError when the front takes nothing now."""
        if self.is_draining:
            raise refuse(ErrorReason.DRAINING)
        if self.limits is None or not self.is_engine_up:
            raise refuse(ErrorReason.ENGINE_DOWN)
        return self.limits

    async def open(
        self, generation: Generation, times: CallTimes, account: RequestAccount | None = None
    ) -> LiveRequest:
        """Take a generation in; the caller must `release` what it gets, whatever happens.

        `account`: of this request, if one is kept; whoever opened it closes it.

        Raises RequestError for every refusal that needs no word of the engine; that word comes
        over the stream.
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
        """The first half of `open`: the request has its place here, the engine knows nothing yet.

        Raises RequestError.
        """
        self.current_limits()
        if times.call_deadline_s <= self.clock():
            raise refuse(
                ErrorReason.DEADLINE_EXCEEDED, state="PENDING", phase="queue", deadline="grpc"
            )
        kept = generation.resumption
        if kept is not None and len(kept.message) > self.config.max_resume_bytes:
            raise refuse(ErrorReason.QUEUE_FULL, "it is too much to be kept for Resume")
        self.gate.check(
            self.hello,
            generation.sampling.num_outputs,
            tenant=generation.tenant,
            priority=generation.urgency.priority,
        )
        request_id = generation.request_id or str(uuid.uuid4())
        request = LiveRequest(request_id, generation, times.arrival_s)
        self.table.add(request)
        if account is not None:
            account.live = request
        return request

    async def start(self, request: LiveRequest, times: CallTimes) -> None:
        """The second half: tokenise, and give it to the engine. Raises RequestError.

        One that was cancelled or lost meanwhile has its end in its stream already.
        """
        if request.stream.is_closed:
            return
        if self.is_draining:
            raise refuse(ErrorReason.DRAINING)
        await self._submit(request, times)

    def release(self, request: LiveRequest) -> None:
        """The request leaves this front; the engine drops what still runs of it. Idempotent."""
        self.release_all((request,))

    def release_all(self, requests: Iterable[LiveRequest]) -> None:
        """Release each, with one word to the engine for all of them.

        What outlives its call is only parked: it stays as long as it runs.
        """
        live_keys: list[int] = []
        unread: list[str] = []
        for request in requests:
            if request.is_released or request.is_parked:
                continue
            if request.generation.resumption is not None and request.outputs:
                unread.append(engine_request_id(request.tenant, request.request_id))
                if request.stream.is_closed:
                    self._keep_result(request)
                    self._remove(request)
                else:
                    self._park(request)
                continue
            self._remove(request)
            live_keys += request.live_keys
        self._cancel_keys(tuple(live_keys), FinishReason.CANCELLED)
        if unread and isinstance(self.port, ResumePort):
            self.port.detach(tuple(unread))

    def detach(self, request: LiveRequest, refusal: Refusal) -> None:
        """The request goes on elsewhere; who reads it here is told `refusal`."""
        request.fail(refusal, self.clock())
        self._remove(request)

    def apply_history(self, request: LiveRequest, events: StepEvents) -> None:
        """News of a request of `attaching`, which was started: they come into its stream.

        Only these: what an engine reports meanwhile comes after them, and does not find it yet.
        """
        self.table.add_outputs(request)
        self._dispatcher.dispatch(events, events.at_s, is_history=True)
        self.table.remove_outputs(request)

    def finish_attach(self, request: LiveRequest, is_same_engine: bool) -> None:
        """All that has come of a request of `attaching` is in its stream: it lives here now.

        `is_same_engine`: more comes from the engine that has told this. Another has to be given it.
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

    def close_account(self, account: RequestAccount, outcome: Outcome) -> None:
        """The request of `account` is over, and released. Only the first time counts."""
        now_s = self.clock()
        self.accounts.close(account, outcome, now_s, is_engine_up=self.is_engine_up)

    async def cancel(self, request_id: str, tenant: str = NO_TENANT) -> RequestState:
        """Cancel a live request of `tenant`, here or on another front; where it stood.

        Raises RequestError when nobody has it or no engine is there to ask.
        """
        request = self.table.get(request_id, tenant)
        if request is not None:
            return self.cancel_here(request)
        if self.port is None:
            raise refuse(ErrorReason.ENGINE_DOWN)
        try:
            known = await self.port.cancel_by_id(engine_request_id(tenant, request_id))
        except EngineUnavailable:
            raise refuse(ErrorReason.ENGINE_DOWN) from None
        if known is None:
            raise refuse(ErrorReason.REQUEST_NOT_FOUND)
        return known

    def cancel_here(self, request: LiveRequest) -> RequestState:
        """Cancel a request that lives here; where it stood. It ends well, as CANCELLED."""
        state = request.state
        if self.replays.cancel(request):
            return state
        if request.outputs:
            # The engine may go before it has said that it did.
            request.is_cancelled = True
            self._cancel_keys(request.live_keys, FinishReason.CANCELLED)
        else:
            request.cancel_unsubmitted(self.model, self.clock())
        return state

    def begin_drain(self) -> None:
        """Take nothing new from now on. Writers that serve nobody any more may go."""
        self.is_draining = True
        for writer in self.shared_writers:
            writer.wake()

    def on_hello(self, hello: EngineHello) -> None:
        """An engine is there (again). What still lives here belonged to an earlier one.

        An epoch that is known: it was never gone, only the way to it.
        """
        self.on_lost()
        is_same_engine = self.hello is not None and self.hello.epoch == hello.epoch
        self.hello = hello
        self.ready_time_s = time.time()
        self.limits = Limits.of(self.config, hello.executor, self.text.files.vocab_size)
        # Its tokenizer may be another model's: what it draws must not end a stream.
        self.text.detokenizer.cover(hello.executor.vocab_size)
        num_known = self.text.files.tokenizer.get_vocab_size(True)
        if num_known > self.limits.vocab_size:
            log.warning(
                "the tokenizer of %s knows %d tokens and the model %d: prompts with one of the"
                " others are refused",
                self.text.files.path,
                num_known,
                self.limits.vocab_size,
            )
        self.replays.resubmit(self.limits, is_same_engine=is_same_engine)
        if isinstance(self.port, ResumePort):
            for request in self.table:
                self._keep_result(request)  # of those whose readers are not at their end
            with contextlib.suppress(EngineUnavailable):  # the one after it gets them
                for result in self.results:
                    self.port.submit_kept((), result)

    def on_events(self, events: StepEvents) -> None:
        """One step's news."""
        for waiting in self.attaching.values():
            waiting.append(events)
        self._dispatcher.dispatch(events, self.clock())

    def on_lost(self) -> None:
        """The engine is gone, and every request waits for the next one."""
        self.accounts.settle()
        self._dispatcher.newest_place = None
        # Of those on their way here not all is known yet: the next engine gets them once it is.
        waits = [one for one in self.table if one not in self.attaching or not self.replays.are_on]
        self.replays.lose(waits)

    def on_given_up(self) -> None:
        """No engine will come any more: whoever waits for one ends now."""
        self.replays.give_up()

    def fail_all(self, refusal: Refusal) -> None:
        """End every live request with `refusal`."""
        now_s = self.clock()
        for request in self.table:
            request.fail(refusal, now_s)

    def leave_resumable(self, refusal: Refusal) -> None:
        """This front is about to go: what may be resumed is left to the engine, and not ended.

        Whoever reads it is told `refusal`.
        """
        left = [
            request
            for request in self.table
            if request.generation.resumption is not None and request.is_at_engine
        ]
        for request in left:
            self.detach(request, refusal)
        if left and isinstance(self.port, ResumePort):
            self.port.detach(tuple(engine_request_id(one.tenant, one.request_id) for one in left))

    def cut_stalled(self) -> None:
        """Cut every reader that has blocked one write for longer than allowed."""
        now_s = self.clock()
        oldest_s = now_s - self.config.max_reader_stall_s
        for request in self.table:
            since_s = request.stream.blocked_since_s
            if since_s < oldest_s and not request.stream.is_cut:
                why = f"one write blocked for {now_s - since_s:.1f} s"
                self._dispatcher.cut(request, why, now_s)
        for writer in self.shared_writers:
            since_s = writer.blocked_since_s
            if since_s < oldest_s and not writer.is_cut:
                self._dispatcher.cut_shared(
                    writer, f"one write blocked for {now_s - since_s:.1f} s", now_s
                )
        self._dispatcher.report_closed(now_s)

    def known_limits(self) -> Limits:
        """Of the engine; of the last one, if the next will do. Raises RequestError."""
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
        if request.stream.is_closed:  # cancelled, or the engine was lost, while it was tokenised
            return
        limits = self.known_limits()
        if limits.block_size != began_with.block_size:
            # Another engine has come, and the prompt was hashed for the one before.
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
            # It went while the request was prepared: the next one gets it.
            self.replays.suspend(request)
            return
        self._note_sent(request)
        self.counters.num_submitted += 1
        # An engine that refuses says so with its next step; only then has a client something to
        # retry, so the first message waits a little for that word.
        request.head.accept_after(self.config.acceptance_delay_s, asyncio.get_running_loop())

    def _remove(self, request: LiveRequest) -> None:
        """It leaves this front, whatever becomes of it elsewhere. Idempotent."""
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
        """Nobody reads it here: the engine keeps what comes of it; here it is for the next one."""
        request.is_parked = True
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
        """The engine was given the request: its outputs wait there."""
        request.is_at_engine = True
        num_queued = request.num_queued
        self.gate.note_sent(num_queued, num_queued * request.num_prompt_tokens)

    def _cancel_keys(self, keys: tuple[int, ...], reason: FinishReason) -> None:
        if keys and self.port is not None:
            self.port.cancel(keys, reason)
