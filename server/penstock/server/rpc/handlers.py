"""Wraps all handlers: counts their active calls, and converts exceptions to gRPC statuses.

RequestError and OtherRequestFailed become the status of their `Failure`, and unexpected exceptions
become INTERNAL. Handlers take and return bytes, so that Penstock itself reports malformed messages.
CancelledError always propagates: a client that disconnects is not an error, and a call whose
CancelledError is suppressed leaks.

No stack frame here may hold a reference to the bytes of a call. grpc.aio keeps the exception that
ended the call, and with it these frames, until the garbage collector runs. The garbage collector
does not take the number of bytes into account.

A method that serves one request receives the account of the request. The account collects the data
for the request's record (`front/accounts.py`). The account is closed here, where the status of each
call is set. The outcome of a cancelled call depends on what ended it: its client, its deadline, or
the server.
"""

import asyncio
import logging
import math
import random
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.rpc.status_pb2 import Status

from penstock.server.front.accounts import Outcome, RequestAccount
from penstock.server.front.errors import INTERNAL, ErrorReason, Failure, RequestError
from penstock.server.front.front import Front
from penstock.server.observe.request_record import RequestOptions
from penstock.server.observe.trace_context import (
    NOT_TRACED,
    TRACEPARENT_KEY,
    TRACESTATE_KEY,
    RemoteParent,
    parse_traceparent,
    trace_metadata,
)
from penstock.server.rpc.mapping_in.generation import valid_request_id
from penstock.server.rpc.statuses import STATUS_RULES, abort_of, retry_delay_s, status_of
from penstock.server.security.rights import Caller
from penstock.server.tenants import new_request_id
from penstock.v1 import generation_service_pb2 as pb

Context = grpc.aio.ServicerContext[bytes, bytes]
UnaryHandler = Callable[[bytes, Context], Awaitable[bytes]]
StreamHandler = Callable[[bytes, Context], Awaitable[None]]
CallerUnaryHandler = Callable[[bytes, Context, Caller], Awaitable[bytes]]
CallerStreamHandler = Callable[[bytes, Context, Caller], Awaitable[None]]
UnaryRequestHandler = Callable[[bytes, Context, RequestAccount], Awaitable[bytes]]
StreamRequestHandler = Callable[[bytes, Context, RequestAccount], Awaitable[None]]
R = TypeVar("R")
logger = logging.getLogger(__name__)
_ABORT_TIMEOUT_S = 5.0
"""How long the write of a status may wait for a full flow-control window before the call is reset,
in seconds."""
_OPTION_DIGITS = 6
"""Decimals of recorded options. They arrive in single precision: 0.7 would be 0.699999988."""
OK: Final = Outcome(grpc.StatusCode.OK.value[0])
CANCELLED: Final = Outcome(grpc.StatusCode.CANCELLED.value[0])
_DEADLINE_SLACK_S = 0.01
_DEADLINE_SLACK_SHARE = 0.01
"""How much earlier the client's deadline may expire than the deadline known here: a fixed time in
seconds, plus a share of the timeout.

gRPC rounds up the timeout that it sends, by less than 1 %.
"""


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """The message of a call, and its caller, authenticated before the message was read."""

    data: bytes
    caller: Caller


ReceivedCall = AdmittedCall | Failure
"""The message of a call, or the failure if its caller is rejected."""


class OtherRequestFailed(Exception):
    """A call failed because of an error that concerns the request of another call. RequestInfo has
    the `request_id` of that other request."""

    def __init__(self, failure: Failure, request_id: str) -> None:
        super().__init__(failure.reason.value)
        self.failure = failure
        self.request_id = request_id


class CallAccounts:
    """Opens and closes the accounts (data for the records) of one service's requests, in one
    gRPC server process."""

    def __init__(self, front: Front, service_name: str) -> None:
        self._front = front
        self._accounts = front.accounts
        self._model = front.model
        self._model_names = front.model_names
        self._service_name = service_name

    def open(self, method: str, context: Context) -> RequestAccount:
        """Return a new account for a request whose call of `method` has just arrived."""
        if not self._accounts.is_enabled:
            return RequestAccount(method, "", self._front.clock(), NOT_TRACED)
        return self.open_with_parent(method, context.peer(), self.parent_of(context))

    def open_with_parent(
        self, method: str, peer: str, parent: RemoteParent | None
    ) -> RequestAccount:
        """Return a new account for a request that has just arrived. Used directly for requests that
        share a call."""
        name = f"{self._service_name}/{method}"
        arrival_s = self._front.clock()
        return self._accounts.open(name, arrival_s=arrival_s, peer=peer, parent=parent)

    def close(self, account: RequestAccount, outcome: Outcome) -> None:
        """Close the account. This completes its record. Call this after the call has ended, if
        possible after its status was sent."""
        if self._accounts.is_enabled:
            front = self._front
            self._accounts.close(account, outcome, front.clock(), is_engine_up=front.is_engine_up)

    def parent_of(self, context: Context) -> RemoteParent | None:
        """Return the remote parent span in the metadata of a call.

        Returns None if tracing is off, or if the metadata does not have exactly one `traceparent`,
        or if that is invalid.
        """
        if not self._accounts.is_tracing:
            return None
        metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
        traceparent: str | bytes | None = None
        states: list[str] = []
        for key, value in metadata:
            if key == TRACEPARENT_KEY:
                if traceparent is not None:
                    return None
                traceparent = value
            elif key == TRACESTATE_KEY:
                states.append(value if isinstance(value, str) else value.decode("latin-1"))
        if traceparent is None:
            return None
        return parse_traceparent(traceparent, ",".join(states) if states else "")

    def describe(
        self, account: RequestAccount, message: pb.GenerateRequest, *, is_stream: bool
    ) -> None:
        """Store the id of `message` in `account`; if records are kept, also its options, and its
        model unless the name is unknown. Call this before the message is validated.

        A missing or invalid id is replaced by a new one.
        """
        account.request_id = valid_request_id(message) or new_request_id()
        if not self._accounts.is_enabled:
            return
        # Any other name would add a series to all metrics.
        if not message.HasField("model") or message.model in self._model_names:
            account.model = self._model
        account.options = _options_of(message, is_stream=is_stream)


class HandlerWrapper:
    """Wraps service methods in gRPC handlers. The handlers count calls and convert exceptions to
    statuses.

    `on_internal_error` is called for each internal error.
    `retry_after_s` is the default retry delay of failures. `random` returns a uniform random number
    in [0, 1).
    """

    def __init__(
        self,
        *,
        retry_after_s: float,
        on_internal_error: Callable[[], None],
        random: Callable[[], float] = random.random,
    ) -> None:
        self._retry_after_s = retry_after_s
        self._random = random
        self._on_internal_error = on_internal_error
        self._num_active_calls = 0
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def unary(self, method: str, handler: UnaryHandler) -> "grpc.RpcMethodHandler[Any, Any]":
        """Wrap a unary method whose handler receives the message and the context."""
        return self.unary_with_caller(method, lambda data, context, _: handler(data, context))

    def unary_with_caller(
        self, method: str, handler: CallerUnaryHandler
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Wrap a unary method whose handler also receives the `Caller`."""
        return grpc.unary_unary_rpc_method_handler(self._for_caller(method, handler))

    def server_stream(
        self, method: str, handler: StreamHandler
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Wrap a server-streaming method; `handler` writes the responses to the context."""
        return self.stream_with_caller(method, lambda data, context, _: handler(data, context))

    def stream_with_caller(
        self, method: str, handler: CallerStreamHandler
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Wrap a server-streaming method whose handler also receives the `Caller`."""
        return grpc.unary_stream_rpc_method_handler(self._for_caller(method, handler))

    def unary_request(
        self, method: str, handler: UnaryRequestHandler, accounts: CallAccounts
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Wrap a unary method that serves one request; `handler` also receives its account."""
        return grpc.unary_unary_rpc_method_handler(self._for_request(method, handler, accounts))

    def stream_request(
        self, method: str, handler: StreamRequestHandler, accounts: CallAccounts
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Wrap a server-streaming method that serves one request; `handler` also receives its
        account."""
        return grpc.unary_stream_rpc_method_handler(self._for_request(method, handler, accounts))

    def bidirectional(
        self, method: str, handler: Callable[[Context], Awaitable[None]]
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Wrap a bidirectional method; `handler` reads from the context and writes to it."""

        async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
            del requests
            await self._run(method, handler(context), context)

        return grpc.stream_stream_rpc_method_handler(handle)

    @property
    def num_active_calls(self) -> int:
        """Number of calls that are being handled."""
        return self._num_active_calls

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun since the start."""
        return self._num_calls

    async def wait_until_idle(self) -> None:
        """Wait until no call is being handled. Sending the status of a call is part of handling
        it."""
        await self._idle.wait()

    def status(self, failure: Failure, request_id: str) -> Status:
        """Return the status of a failed request of a Multiplex call, with a randomised retry
        delay."""
        return status_of(failure, request_id=request_id, retry_after_s=self._retry_delay_s(failure))

    def internal_error(
        self, method: str, error: Exception, *, request_id: str = "", trace_id: bytes = b""
    ) -> Failure:
        """Count and log an internal error, with the ids of its request if they are known; return
        the failure to report."""
        self._on_internal_error()
        # Log only the frames: the text of an exception may quote a prompt.
        frames = "".join(traceback.format_tb(error.__traceback__))
        extra = {"request_id": request_id, "trace_id": trace_id.hex()}
        logger.error("%s failed with %s\n%s", method, type(error).__name__, frames, extra=extra)
        return INTERNAL

    def _unexpected_failure(
        self, method: str, error: Exception, account: RequestAccount | None
    ) -> Failure:
        if account is None:
            return self.internal_error(method, error)
        return self.internal_error(
            method, error, request_id=account.request_id, trace_id=account.trace.trace_id
        )

    def _retry_delay_s(self, failure: Failure) -> float | None:
        return retry_delay_s(failure, default_s=self._retry_after_s, chance=self._random())

    def _for_caller(
        self, method: str, handler: Callable[[bytes, Context, Caller], Awaitable[object]]
    ) -> Any:
        async def handle(arrived: ReceivedCall, context: Context) -> object:
            call: Awaitable[object]
            if isinstance(arrived, Failure):
                call = _fail(arrived)
            else:
                call = handler(arrived.data, context, arrived.caller)
            del arrived
            return await self._run(method, call, context)

        return handle

    def _for_request(
        self,
        method: str,
        handler: Callable[[bytes, Context, RequestAccount], Awaitable[object]],
        accounts: CallAccounts,
    ) -> Any:
        async def handle(arrived: ReceivedCall, context: Context) -> object:
            account = accounts.open(method, context)
            call: Awaitable[object]
            if isinstance(arrived, Failure):
                call = _fail(arrived)
            else:
                caller = arrived.caller
                account.tenant, account.ceilings = caller.tenant, caller.ceilings
                call = handler(arrived.data, context, account)
            del arrived
            return await self._run_request(method, call, context, account, accounts)

        return handle

    async def _run_request(
        self,
        method: str,
        call: Awaitable[R],
        context: Context,
        account: RequestAccount,
        accounts: CallAccounts,
    ) -> R:
        try:
            result = await self._run(method, call, context, account)
        except BaseException:
            accounts.close(account, outcome_of_failure(account, context))
            raise
        accounts.close(account, OK)
        return result

    async def _run(
        self,
        method: str,
        call: Awaitable[R],
        context: Context,
        account: RequestAccount | None = None,
    ) -> R:
        self._num_active_calls += 1
        self._num_calls += 1
        self._idle.clear()
        request_id = ""
        try:
            try:
                return await call
            except OtherRequestFailed as error:
                failure, request_id = error.failure, error.request_id
            except RequestError as error:
                failure = error.failure
            except grpc.aio.AbortError:
                raise
            except grpc.aio.BaseError as error:
                # A write that is in progress when the peer disconnects raises this instead of being
                # cancelled. There is no client to report it to, and it is not an internal error.
                raise asyncio.CancelledError from error
            except Exception as error:
                failure = self._unexpected_failure(method, error, account)
            return await self._abort(failure, request_id, context, account)
        finally:
            self._num_active_calls -= 1
            if not self._num_active_calls:
                self._idle.set()

    async def _abort(
        self, failure: Failure, request_id: str, context: Context, account: RequestAccount | None
    ) -> NoReturn:
        if account is not None:
            account.failure, request_id = failure, account.request_id
        abort = abort_of(failure, request_id=request_id, retry_after_s=self._retry_delay_s(failure))
        trailers = abort.trailers
        if account is not None:
            trailers = (*trailers, *trace_metadata(account.trace))
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await context.abort(abort.code, abort.message, trailers)
        except grpc.aio.AbortError:
            raise
        except (TimeoutError, grpc.aio.BaseError) as error:
            # If the peer does not read, the deadline may expire while the status is written.
            raise asyncio.CancelledError from error


async def _fail(failure: Failure) -> Any:
    raise RequestError(failure)


def outcome_of(failure: Failure) -> Outcome:
    """Return the outcome of a request that failed with `failure`."""
    return Outcome(STATUS_RULES[failure.reason].code.value[0], failure.reason.value)


def outcome_of_failure(account: RequestAccount, context: Context) -> Outcome:
    """Return the outcome of a call whose handler raised an exception.

    An error of the request takes precedence over a disconnect of the client, so that early
    disconnects do not hide it.
    """
    if account.failure is not None:
        return outcome_of(account.failure)
    if account.request is not None and account.request.stream.failure is not None:
        return outcome_of(account.request.stream.failure)
    return outcome_of_early_end(context, account.call_timeout_s)


def outcome_of_early_end(context: Context, timeout_s: float) -> Outcome:
    """Return the outcome of a call that ended early: DEADLINE_EXCEEDED if its deadline has expired,
    otherwise CANCELLED.

    `timeout_s` is the timeout of the call at its start, infinite without one.
    """
    remaining_s = cast(float | None, context.time_remaining())
    slack_s = _DEADLINE_SLACK_S + _DEADLINE_SLACK_SHARE * timeout_s
    if remaining_s is not None and math.isfinite(remaining_s) and remaining_s <= slack_s:
        return outcome_of(Failure(reason=ErrorReason.DEADLINE_EXCEEDED))
    return CANCELLED


def call_timeout_s(context: Context) -> float:
    """Return the time until the deadline of a call in seconds, infinite without a deadline."""
    remaining_s = cast(float | None, context.time_remaining())
    return math.inf if remaining_s is None else remaining_s


def peer_of(front: Front, context: Context) -> str:
    """Return the address of the peer in gRPC's format.

    Returns "" if requests are not recorded, because only records need it.
    """
    return context.peer() if front.accounts.is_enabled else ""


def _options_of(message: pb.GenerateRequest, *, is_stream: bool) -> RequestOptions:
    sampling, stopping = message.sampling, message.stopping
    is_set = sampling.HasField
    return RequestOptions(
        message.HasField("chat_prompt"),
        is_stream,
        sampling.num_outputs if is_set("num_outputs") else 1,
        stopping.max_tokens if stopping.HasField("max_tokens") else None,
        round(sampling.temperature, _OPTION_DIGITS) if is_set("temperature") else None,
        round(sampling.top_p, _OPTION_DIGITS) if is_set("top_p") else None,
        sampling.top_k if is_set("top_k") else None,
        round(sampling.frequency_penalty, _OPTION_DIGITS) if is_set("frequency_penalty") else None,
        round(sampling.presence_penalty, _OPTION_DIGITS) if is_set("presence_penalty") else None,
        sampling.seed if is_set("seed") else None,
        message.scheduling.priority,
    )
