"""Sends the requests of the blocking client over Multiplex calls, each of which has many requests.

Owns the calls, the threads that read them, and the locks around their requests. `multiplex.py` maps
events to requests and decides when credit (the tokens that the server may still send) is granted.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Self

import grpc

import penstock.v1 as pb
from penstock.client.call_settings import Pairs
from penstock.client.errors import PenstockError
from penstock.client.local_errors import (
    client_closed,
    deadline_passed,
    multiplex_ended,
    multiplex_error,
)
from penstock.client.multiplex import MultiplexConfig, MultiplexedRequest, MultiplexedRequests
from penstock.client.status import error_from_call


class SyncMultiplexStream:
    """The response messages of one request on a Multiplex call, with the interface of a
    Generate call."""

    def __init__(
        self,
        call: "_Call",
        open_request: MultiplexedRequest,
        has_updates: threading.Event,
        timeout_s: float | None,
    ) -> None:
        self._call = call
        self._open_request = open_request
        self._has_updates = has_updates
        self._expires_s = None if timeout_s is None else time.monotonic() + timeout_s

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        try:
            response = self._open_request.take()
            while response is None:
                # In this order, no message between the two statements is missed.
                self._has_updates.clear()
                response = self._open_request.take()
                if response is None:
                    self._wait()
        except EOFError:
            raise StopAsyncIteration from None
        self._call.send(self._open_request.credit())
        return response

    def cancel(self) -> bool:
        """Cancel the request if it has not ended, from any thread. Returns True if it was open."""
        return self._call.cancel(self._open_request)

    def _wait(self) -> None:
        if self._expires_s is None:
            self._has_updates.wait()
        elif not self._has_updates.wait(max(0.0, self._expires_s - time.monotonic())):
            self._call.expire(self._open_request)


class SyncMultiplexer:
    """The Multiplex calls of one channel: the current call, and older calls with open requests."""

    def __init__(
        self,
        channel: grpc.Channel,
        config: MultiplexConfig,
        metadata: Pairs,
        clock: Callable[[], float],
    ) -> None:
        self._stub = pb.GenerationServiceStub(channel)
        self._config = config
        self._metadata = metadata
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: list[_Call] = []
        self._is_closed = False

    def open(
        self, request: pb.GenerateRequest, timeout_s: float | None, traceparent: str | None
    ) -> SyncMultiplexStream:
        """Start a request. Opens a new call if the current call does not accept it.

        Raises DeadlineExceeded if `timeout_s` is not positive, ResourceExhausted if the request is
        too large, CallCancelled if the client was closed, and Unavailable if the new call does not
        accept it either.
        """
        if timeout_s is not None and timeout_s <= 0:
            raise deadline_passed()
        has_updates = threading.Event()
        now_s = self._clock()
        with self._lock:
            if self._is_closed:
                raise client_closed()
            for call in tuple(self._calls):
                open_request = call.submit(request, timeout_s, traceparent, has_updates.set, now_s)
                if open_request is not None:
                    break
                call.retire()
            else:
                requests = MultiplexedRequests(self._config, opened_at_s=now_s)
                call = _Call(self._stub, self._metadata, requests, self._remove)
                self._calls.append(call)
                try:
                    open_request = call.submit(
                        request, timeout_s, traceparent, has_updates.set, now_s
                    )
                finally:
                    call.start()
        if open_request is None:
            raise multiplex_ended()
        return SyncMultiplexStream(call, open_request, has_updates, timeout_s)

    async def close(self) -> None:
        """Cancel the calls. Readers of open requests get CallCancelled."""
        with self._lock:
            self._is_closed = True
            calls = tuple(self._calls)
        for call in calls:
            call.close()

    def _remove(self, call: "_Call") -> None:
        with self._lock:
            self._calls.remove(call)


class _Call:
    """One Multiplex call: its requests, the commands not sent yet, and the thread that
    reads it."""

    def __init__(
        self,
        stub: pb.GenerationServiceStub,
        metadata: Pairs,
        requests: MultiplexedRequests,
        on_end: "Callable[[_Call], None]",
    ) -> None:
        self._requests = requests
        self._lock = threading.Lock()
        self._on_end = on_end
        self._is_retired = False
        # None closes the sending side.
        self._commands: queue.SimpleQueue[pb.MultiplexRequest | None] = queue.SimpleQueue()
        self._call = stub.Multiplex(iter(self._commands.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="penstock-multiplex", daemon=True)

    def start(self) -> None:
        """Start the reading thread."""
        self._reader.start()

    def submit(
        self,
        request: pb.GenerateRequest,
        timeout_s: float | None,
        traceparent: str | None,
        wake: Callable[[], None],
        now_s: float,
    ) -> MultiplexedRequest | None:
        """Start a request; return None if this call accepts no more requests. Raises
        ResourceExhausted if the request is too large."""
        with self._lock:
            if not self._requests.can_submit(now_s):
                return None
            open_request, command = self._requests.submit(
                request, timeout_s=timeout_s, traceparent=traceparent, wake=wake
            )
            self._commands.put(command)
        return open_request

    def send(self, command: pb.MultiplexRequest | None) -> None:
        """Queue a command, if there is one."""
        if command is not None:
            self._commands.put(command)

    def expire(self, open_request: MultiplexedRequest) -> None:
        """Fail a request whose deadline passed, and cancel it on the server, unless it has
        ended."""
        with self._lock:
            self.send(self._requests.expire(open_request))
            self._end_when_unused()

    def cancel(self, open_request: MultiplexedRequest) -> bool:
        """Cancel this request; its reader gets CallCancelled. Returns True if it was still open."""
        with self._lock:
            command = self._requests.cancel(open_request)
            self.send(command)
            self._end_when_unused()
        return command is not None

    def retire(self) -> None:
        """Accept no more requests. The call ends when its last request has ended."""
        with self._lock:
            self._is_retired = True
            self._end_when_unused()

    def close(self) -> None:
        """Cancel the call, fail its open requests with CallCancelled, and wait for the reading
        thread."""
        with self._lock:
            self._requests.end(client_closed())
        self._call.cancel()
        self._reader.join()

    def _end_when_unused(self) -> None:
        if self._is_retired and not self._requests.num_open and not self._requests.has_ended:
            self._commands.put(None)

    def _read(self) -> None:
        error: PenstockError = multiplex_ended()
        try:
            for response in self._call:
                with self._lock:
                    self._requests.receive(response)
                    if self._is_retired:
                        self._end_when_unused()
        except grpc.RpcError as failed:
            error = multiplex_error(error_from_call(failed))
        except PenstockError as broken:
            error = broken
        finally:
            with self._lock:
                self._requests.end(error)
            self._call.cancel()
            self._commands.put(None)
            self._on_end(self)
