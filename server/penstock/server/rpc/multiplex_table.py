"""Stores the requests of one Multiplex stream, by the keys that its client chose.

Executes commands, owns the tasks that tokenize prompts, and releases all requests that have not
ended (`Front.release_all`) when the stream ends. Stores the credit of each request: the number of
tokens that the client is ready to receive.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.scheduler.request import NO_TIME
from penstock.server.front.accounts import Outcome, RequestAccount
from penstock.server.front.errors import Failure, RequestError, invalid_field
from penstock.server.front.front import Front
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.stream import TokenStream, num_tokens_of
from penstock.server.front.submission import CallTimes
from penstock.server.front.watched_write import SharedWriter
from penstock.server.observe.trace_context import RemoteParent, parse_traceparent
from penstock.server.rpc.handlers import OK, CallAccounts, HandlerWrapper, outcome_of
from penstock.server.rpc.mapping_in.generation import num_lowered_priorities, read_generation
from penstock.server.rpc.mapping_out import encoder_for
from penstock.server.rpc.multiplex_encoding import MultiplexEncoder
from penstock.server.rpc.parsing import num_unknown_fields
from penstock.server.security.rights import Caller
from penstock.v1 import generation_service_pb2 as pb

MAX_UNSENT_REJECTIONS: Final = 256
"""Number of rejected requests with unsent errors at which no more commands are read."""


_MAX_BYTES_PER_CHAR = 4


class MultiplexedRequest:
    """A request of a Multiplex stream. `key` is the number that its client chose for it.

    `num_credit_tokens` is the initial credit, the number of tokens that the client is ready to
    receive; None for no limit. `request` is the live request; None before `start_writing` and if
    the request was rejected. `is_ended` is True when nothing is left to take: after `take` has
    returned the last event, after `take` of a rejected request, or after `fail_with`.
    """

    __slots__ = (
        "_clock",
        "_encoder",
        "_failure",
        "_is_marked",
        "_num_credit_tokens",
        "_stream",
        "_writer",
        "account",
        "is_ended",
        "key",
        "request",
    )

    def __init__(
        self,
        key: int,
        writer: "SharedWriter[MultiplexedRequest]",
        account: RequestAccount,
        *,
        num_credit_tokens: int | None = None,
    ) -> None:
        self.key = key
        self.account = account
        self.request: LiveRequest | None = None
        self.is_ended = False
        self._clock: Callable[[], float] = lambda: NO_TIME
        self._writer = writer
        self._num_credit_tokens = num_credit_tokens
        self._encoder: MultiplexEncoder | None = None
        self._stream: TokenStream | None = None
        self._is_marked = False
        self._failure: Failure | None = None

    @property
    def failure(self) -> Failure | None:
        """The error with which the request failed; None if it has not failed."""
        if self._failure is not None or self.request is None:
            return self._failure
        return self.request.stream.failure

    @property
    def num_messages(self) -> int:
        """Number of messages that the request would have had in a Generate stream."""
        return 0 if self._encoder is None else self._encoder.num_responses

    @property
    def request_id(self) -> str:
        """The id of the request; empty until it is known."""
        return self.account.request_id

    def start_writing(self, request: LiveRequest, front: Front) -> None:
        """Start writing the events of `request`, after `front` (the gRPC server process) has
        accepted it."""
        config = front.config
        self.request = request
        self._stream = request.stream
        self._clock = front.clock
        self._encoder = MultiplexEncoder(
            self.key,
            encoder_for(request.generation.output.chunks, config, front.text.token_bytes),
            config.max_message_bytes_hint // _MAX_BYTES_PER_CHAR,
        )
        request.stream.attach(self.mark)
        self.mark()

    def reject(self, failure: Failure) -> None:
        """Reject the request. The error `failure` is sent instead of its events."""
        self._failure = failure
        self.mark()

    def give_credit(self, num_tokens: int) -> None:
        """Add `num_tokens` tokens of credit. Ignored if the credit is unlimited."""
        if self._num_credit_tokens is not None:
            self._num_credit_tokens += num_tokens
            self.mark()

    def mark(self) -> None:
        """Queue the request for the writer, because it may have events. Idempotent until the next
        `take`."""
        if not self._is_marked and not self.is_ended:
            self._is_marked = True
            self._writer.mark(self)

    def take(self) -> Sequence[bytes]:
        """Return the events that may be written now, encoded. Sets `is_ended` with the last event.

        The error of a failed request is not returned as an event; see `failure`.
        """
        self._is_marked = False
        stream, encoder, credit = self._stream, self._encoder, self._num_credit_tokens
        if stream is None or encoder is None or self._failure is not None:
            self.is_ended = self._failure is not None
            return ()
        # The most frequent case: one token of plain text per call.
        text = stream.take_text() if credit != 0 else None
        if text is not None:
            num_tokens = 1
            events: Sequence[bytes] = (encoder.encode_text(text),)
        else:
            batch = stream.take_due(credit)
            num_tokens = 0 if credit is None else num_tokens_of(batch)
            events = encoder.encode(batch) if batch else ()
        self.is_ended = stream.is_closed and stream.is_drained
        if credit is not None:
            self._num_credit_tokens = credit - num_tokens
            if stream.is_closed:
                # The backlog of a closed stream does not grow beyond its limit, so only this time
                # limit ends a request whose client gives no more credit.
                stream.wait_for_reader(NO_TIME if self.is_ended else self._clock())
        return events

    def fail_with(self, failure: Failure) -> None:
        """End the request with `failure`, because `take` failed and the events that it took are
        lost."""
        self._failure = failure
        self.is_ended = True


@dataclass(frozen=True, slots=True)
class MultiplexCaller:
    """The properties of a call that its requests share.

    `authorize` checks the caller's rights again, because the policy file may change during a call;
    it raises RequestError. `parent` is the call's remote trace span.
    """

    tenant: str
    peer: str
    parent: RemoteParent | None
    authorize: Callable[[], Caller]


class MultiplexTable:
    """The requests of one call, all of one tenant. All methods must be called on the event loop."""

    def __init__(
        self,
        front: Front,
        wrapper: HandlerWrapper,
        writer: SharedWriter[MultiplexedRequest],
        accounts: CallAccounts,
        caller: MultiplexCaller,
    ) -> None:
        self._front = front
        self._wrapper = wrapper
        self._writer = writer
        self._accounts = accounts
        self._caller = caller
        self._requests: dict[int, MultiplexedRequest] = {}
        self._ended: list[tuple[RequestAccount, Outcome]] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._num_unsent_rejections = 0
        self._may_read = asyncio.Event()
        self._may_read.set()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def has_unwritten_ends(self) -> bool:
        """True if the last event of an ended request is not written yet."""
        return bool(self._ended)

    def submit(self, message: pb.MultiplexSubmit, failure: Failure | None = None) -> None:
        """Start a request. If it fails, or if `failure` (the error found while the message was
        parsed) is not None, the error is sent as the last event of the request.

        Raises RequestError if the key is in use, because its events would be ambiguous.
        """
        account = self._open_account(message)
        if message.key in self._requests:
            error = invalid_field("submit.key", "is the key of a request that has not ended")
            self._accounts.close(account, outcome_of(error.failure))
            raise error
        request = MultiplexedRequest(
            message.key,
            self._writer,
            account,
            num_credit_tokens=(
                message.num_credit_tokens if message.HasField("num_credit_tokens") else None
            ),
        )
        self._requests[message.key] = request
        # The deadline of the call is not the deadline of the request.
        times = CallTimes(arrival_s=account.arrival_s)
        if failure is None:
            try:
                live = self._reserve(message, times, account)
            except RequestError as error:
                failure = error.failure
            else:
                request.start_writing(live, self._front)
                task = asyncio.create_task(self._start(live, times), name="multiplex start")
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)
                return
        self._reject(request, failure)

    def cancel(self, key: int) -> None:
        """End the request with this key as CANCELLED. Ignored if there is none."""
        request = self._requests.get(key)
        if request is not None and request.request is not None:
            self._front.cancel_here(request.request)

    def give_credit(self, key: int, num_tokens: int) -> None:
        """Add `num_tokens` tokens of credit to the request with this key. Ignored if there is
        none."""
        request = self._requests.get(key)
        if request is not None:
            request.give_credit(num_tokens)

    async def wait_for_unsent_rejections(self) -> None:
        """Wait until fewer than MAX_UNSENT_REJECTIONS rejected requests have unsent errors."""
        await self._may_read.wait()

    def end(self, request: MultiplexedRequest) -> None:
        """Remove and release `request` after its last event was taken. Its account stays open until
        `close_ended_accounts`."""
        del self._requests[request.key]
        request.account.num_messages = request.num_messages
        outcome = OK if request.failure is None else outcome_of(request.failure)
        self._ended.append((request.account, outcome))
        if request.request is not None:
            self._front.release(request.request)
            return
        self._num_unsent_rejections -= 1
        self._may_read.set()

    def close_ended_accounts(self) -> None:
        """Close the accounts (data for the records) of ended requests. Call this when all events
        that were taken have been written."""
        if self._ended:
            ended, self._ended = self._ended, []
            for account, outcome in ended:
                self._accounts.close(account, outcome)

    def release_all(self, outcome: Outcome) -> None:
        """Release all requests with `Front.release_all` at the end of the stream.

        The requests are recorded with `outcome`, the outcome of the call. A failed request is
        recorded with its failure instead, even if the failure was not sent.
        """
        for task in self._starting:
            task.cancel()
        requests, self._requests = self._requests, {}
        self._front.release_all(
            request.request for request in requests.values() if request.request is not None
        )
        for account, end in self._ended:
            self._accounts.close(account, outcome if end is OK else end)
        for request in requests.values():
            account = request.account
            account.num_messages = request.num_messages
            failure = request.failure
            self._accounts.close(account, outcome if failure is None else outcome_of(failure))

    def _open_account(self, message: pb.MultiplexSubmit) -> RequestAccount:
        accounts, caller = self._accounts, self._caller
        parent = caller.parent
        if message.HasField("traceparent"):
            parent = parse_traceparent(message.traceparent)
        account = accounts.open_with_parent("Multiplex", caller.peer, parent)
        account.tenant = caller.tenant
        account.share(self._writer)
        accounts.describe(account, message.generation, is_stream=True)
        return account

    def _reserve(
        self, message: pb.MultiplexSubmit, times: CallTimes, account: RequestAccount
    ) -> LiveRequest:
        front = self._front
        caller = self._caller.authorize()
        generation = read_generation(
            message.generation,
            front.current_limits(),
            front.model_names,
            tenant=account.tenant,
            ceilings=caller.ceilings,
            trace_id=account.trace.trace_id,
        )
        front.counters.num_unknown_fields += num_unknown_fields(message)
        front.counters.num_lowered_priorities += num_lowered_priorities(
            message.generation, caller.ceilings
        )
        return front.reserve(generation, times, account)

    async def _start(self, live: LiveRequest, times: CallTimes) -> None:
        try:
            await self._front.start(live, times)
        except RequestError as error:
            live.fail(error.failure, self._front.clock())
        except Exception as error:
            failure = self._wrapper.internal_error(
                "Multiplex", error, request_id=live.request_id, trace_id=live.trace_id
            )
            live.fail(failure, self._front.clock())

    def _reject(self, request: MultiplexedRequest, failure: Failure) -> None:
        request.reject(failure)
        self._num_unsent_rejections += 1
        if self._num_unsent_rejections >= MAX_UNSENT_REJECTIONS:
            self._may_read.clear()
