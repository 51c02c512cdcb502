"""The wrapper around every handler: domain errors become statuses, bugs become INTERNAL.

Owns the border between our exceptions and gRPC's, and the count of calls being handled. Handlers
take and return bytes, so that we report malformed ones ourselves. CancelledError always propagates:
a client that disconnects is no error, and swallowing it leaks the call.

No frame here may keep the bytes of a call: grpc.aio keeps the exception that ended it, and with it
these frames, until the garbage collector runs, which does not count bytes.

A method that serves one request gets that request's account. It is closed here, the one place that
sees the status of every call.
"""

import asyncio
import logging
import random
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import grpc
import grpc.aio
from google.rpc.status_pb2 import Status

from penstock.server.front.errors import ErrorReason, Refusal, RequestError
from penstock.server.front.request_account import Outcome, RequestAccount
from penstock.server.observe.trace_context import trace_metadata
from penstock.server.rpc.outcomes import OK, outcome_of_failure
from penstock.server.rpc.statuses import abort_of, retry_delay_s, status_of
from penstock.server.security.rights import Caller

Context = grpc.aio.ServicerContext[bytes, bytes]
UnaryHandler = Callable[[bytes, Context], Awaitable[bytes]]
StreamHandler = Callable[[bytes, Context], Awaitable[None]]
CallerUnaryHandler = Callable[[bytes, Context, Caller], Awaitable[bytes]]
CallerStreamHandler = Callable[[bytes, Context, Caller], Awaitable[None]]
UnaryRequestHandler = Callable[[bytes, Context, RequestAccount], Awaitable[bytes]]
StreamRequestHandler = Callable[[bytes, Context, RequestAccount], Awaitable[None]]
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Admitted:
    """The message of a call, and its caller as authenticated before the message was read."""

    data: bytes
    caller: Caller


Arrived = Admitted | Refusal
"""The message of a call, or the refusal of its caller."""

_log = logging.getLogger(__name__)
_INTERNAL = Refusal(reason=ErrorReason.INTERNAL)
_ABORT_TIMEOUT_S = 5.0
"""How long writing a status may block on a full flow-control window before the call is reset."""


class CallFailed(Exception):
    """A failure with the id of the request it belongs to, for RequestInfo."""

    def __init__(self, refusal: Refusal, request_id: str) -> None:
        super().__init__(refusal.reason.value)
        self.refusal = refusal
        self.request_id = request_id


class AccountKeeper(Protocol):
    """Keeps the accounts of the requests of some methods."""

    def open(self, method: str, context: Context) -> RequestAccount:
        """A call of `method` has arrived with a request. Must not raise."""
        ...

    def close(self, account: RequestAccount, outcome: Outcome) -> None:
        """The call is over and its status was sent, if that was possible."""
        ...


class HandlerWrapper:
    """Makes method handlers. `on_internal_error` is called for every bug.

    `retry_after_s`: when refused callers may retry, unless the refusal has its own delay. `random`
    draws uniformly from [0, 1).
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
        """A unary method."""
        return self.unary_with_caller(method, lambda data, context, _: handler(data, context))

    def unary_with_caller(
        self, method: str, handler: CallerUnaryHandler
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A unary method that needs its caller."""

        async def handle(arrived: Arrived, context: Context) -> bytes:
            call = _called(handler, arrived, context)
            del arrived
            return await self._run(method, call, context)

        return grpc.unary_unary_rpc_method_handler(cast(Any, handle))

    def server_stream(
        self, method: str, handler: StreamHandler
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A server-streaming method; `handler` writes to the context."""
        return self.stream_with_caller(method, lambda data, context, _: handler(data, context))

    def stream_with_caller(
        self, method: str, handler: CallerStreamHandler
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A server-streaming method that needs its caller."""

        async def handle(arrived: Arrived, context: Context) -> None:
            call = _called(handler, arrived, context)
            del arrived
            await self._run(method, call, context)

        return grpc.unary_stream_rpc_method_handler(cast(Any, handle))

    def unary_request(
        self, method: str, handler: UnaryRequestHandler, keeper: AccountKeeper
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A unary method that serves one request."""

        async def handle(arrived: Arrived, context: Context) -> bytes:
            account = keeper.open(method, context)
            call = _called_for(account, handler, arrived, context)
            del arrived
            return await self._run_request(method, call, context, account, keeper)

        return grpc.unary_unary_rpc_method_handler(cast(Any, handle))

    def stream_request(
        self, method: str, handler: StreamRequestHandler, keeper: AccountKeeper
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A server-streaming method that serves one request."""

        async def handle(arrived: Arrived, context: Context) -> None:
            account = keeper.open(method, context)
            call = _called_for(account, handler, arrived, context)
            del arrived
            await self._run_request(method, call, context, account, keeper)

        return grpc.unary_stream_rpc_method_handler(cast(Any, handle))

    def bidirectional(
        self, method: str, handler: Callable[[Context], Awaitable[None]]
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A bidirectional method that needs its context only."""

        async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
            del requests
            await self._run(method, handler(context), context)

        return grpc.stream_stream_rpc_method_handler(handle)

    @property
    def num_active_calls(self) -> int:
        """Calls being handled."""
        return self._num_active_calls

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return self._num_calls

    async def wait_until_idle(self) -> None:
        """Return once no call is being handled, its status included."""
        await self._idle.wait()

    def status(self, refusal: Refusal, request_id: str) -> Status:
        """The status of a request that shares its call with others, with the jitter of a call."""
        return status_of(refusal, request_id=request_id, retry_after_s=self._retry_delay_s(refusal))

    def internal_error(
        self, method: str, error: Exception, *, request_id: str = "", trace_id: bytes = b""
    ) -> Refusal:
        """Count and log a bug, with the known ids of its request.

        Returns the failure to report.
        """
        self._on_internal_error()
        # Frames only: the text of an exception may quote a prompt.
        frames = "".join(traceback.format_tb(error.__traceback__))
        extra = {"request_id": request_id, "trace_id": trace_id.hex()}
        _log.error("%s failed with %s\n%s", method, type(error).__name__, frames, extra=extra)
        return _INTERNAL

    def _bug_of(self, method: str, error: Exception, account: RequestAccount | None) -> Refusal:
        if account is None:
            return self.internal_error(method, error)
        known = account if account.live is None else account.live
        trace_id = account.trace.trace_id
        return self.internal_error(method, error, request_id=known.request_id, trace_id=trace_id)

    def _retry_delay_s(self, refusal: Refusal) -> float | None:
        return retry_delay_s(refusal, default_s=self._retry_after_s, chance=self._random())

    async def _run_request(
        self,
        method: str,
        call: Awaitable[R],
        context: Context,
        account: RequestAccount,
        keeper: AccountKeeper,
    ) -> R:
        try:
            result = await self._run(method, call, context, account)
        except BaseException:
            keeper.close(account, outcome_of_failure(account, context))
            raise
        keeper.close(account, OK)
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
        try:
            return await self._answer(method, call, context, account)
        finally:
            self._num_active_calls -= 1
            if not self._num_active_calls:
                self._idle.set()

    async def _answer(
        self, method: str, call: Awaitable[R], context: Context, account: RequestAccount | None
    ) -> R:
        try:
            return await call
        except CallFailed as error:
            refusal, request_id = error.refusal, error.request_id
        except RequestError as error:
            refusal, request_id = error.refusal, ""
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError as error:
            # A write in progress when the peer vanished raises this instead of being cancelled.
            # There is no client left to report to, and it is not our error.
            raise asyncio.CancelledError from error
        except Exception as error:
            refusal, request_id = self._bug_of(method, error, account), ""
        abort = abort_of(refusal, request_id=request_id, retry_after_s=self._retry_delay_s(refusal))
        trailers = abort.trailers
        if account is not None:
            account.refusal = refusal
            trailers = (*trailers, *trace_metadata(account.trace))
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await context.abort(abort.code, abort.message, trailers)
        except grpc.aio.AbortError:
            raise
        except (TimeoutError, grpc.aio.BaseError) as error:
            # The peer does not read or is gone: its deadline may pass while the status is written.
            raise asyncio.CancelledError from error


def _called(
    handler: Callable[[bytes, Context, Caller], Awaitable[R]], arrived: Arrived, context: Context
) -> Awaitable[R]:
    if isinstance(arrived, Refusal):
        return _refused(arrived)
    return handler(arrived.data, context, arrived.caller)


def _called_for(
    account: RequestAccount,
    handler: Callable[[bytes, Context, RequestAccount], Awaitable[R]],
    arrived: Arrived,
    context: Context,
) -> Awaitable[R]:
    """Attribute the request of `account` to its caller."""
    if isinstance(arrived, Refusal):
        return _refused(arrived)
    caller = arrived.caller
    account.tenant, account.ceilings = caller.tenant, caller.ceilings
    return handler(arrived.data, context, account)


async def _refused(refusal: Refusal) -> Any:
    raise RequestError(refusal)
