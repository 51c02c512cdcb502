"""Stores the state of one Multiplex call, for both clients, and routes its events to requests.

The state of a request consists of its key, its credit (the tokens that the server may still send),
its received messages, and a function that wakes its reader. Does no I/O and has no clock.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from google.protobuf.duration_pb2 import Duration

import penstock.v1 as pb
from penstock.client.argument_types import require_type
from penstock.client.errors import Draining, PenstockError, StreamBroken
from penstock.client.local_errors import deadline_passed, request_cancelled, request_too_large
from penstock.client.status import error_from_status


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiplexConfig:
    """How requests share a Multiplex call. Raises ValueError for an invalid value.

    Attributes:
        window_tokens: Maximum number of unread output tokens of a request: the server sends no more
            until the caller iterates further. Raised to twice `OutputOptions.min_chunk_tokens` if
            that is more. It limits the memory for a slow reader, and should exceed the tokens
            generated in one round trip.
        max_call_age_s: After this many seconds new requests use a new call, so that no call exceeds
            the server's maximum connection age (by default 1800 s plus or minus a tenth).
        max_request_bytes: A larger request fails and is not sent, because it would end the call for
            all requests. Must not exceed the server's `ModelLimits.max_message_bytes`.
    """

    window_tokens: int = 256
    max_call_age_s: float = 1200.0
    max_request_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, if one is out of range."""
        if not 1 <= self.window_tokens <= 1 << 20:
            raise ValueError(
                f"window_tokens: must be from 1 to {1 << 20}, not {self.window_tokens}"
            )
        if not self.max_call_age_s > 0:
            raise ValueError(f"max_call_age_s: must be positive, not {self.max_call_age_s}")
        if self.max_request_bytes < 1:
            raise ValueError(f"max_request_bytes: must be positive, not {self.max_request_bytes}")


def multiplex_config(
    multiplex: bool | MultiplexConfig, *, max_message_bytes: int
) -> MultiplexConfig | None:
    """Return the configuration for a client's `multiplex` argument; None for False.

    True means the defaults. `max_message_bytes` is the limit of the channel; a greater
    `max_request_bytes` is reduced to it. Raises TypeError for another type.
    """
    require_type(multiplex, "multiplex", bool, MultiplexConfig)
    if not multiplex:
        return None
    config = MultiplexConfig() if multiplex is True else multiplex
    return replace(config, max_request_bytes=min(config.max_request_bytes, max_message_bytes))


class MultiplexedRequest:
    """One request on a Multiplex call: its received messages, its credit and its end.

    One thread may add messages while another takes them. This is safe because `take` reads whether
    the request has ended before it looks for messages.
    """

    __slots__ = (
        "_failure",
        "_is_ended",
        "_min_credit_tokens",
        "_num_taken_tokens",
        "_responses",
        "key",
        "request_id",
        "wake",
    )

    def __init__(self, key: int, window_tokens: int, wake: Callable[[], None]) -> None:
        self.key = key
        self.request_id = ""
        self.wake = wake
        self._responses: deque[pb.GenerateResponse] = deque()
        self._failure: PenstockError | None = None
        self._is_ended = False
        self._num_taken_tokens = 0
        self._min_credit_tokens = max(1, window_tokens // 2)

    @property
    def num_waiting(self) -> int:
        """Number of messages that `take` has not returned yet."""
        return len(self._responses)

    def put(self, response: pb.GenerateResponse) -> bool:
        """Add a message. Returns True if it was the last message of the request."""
        if not self.request_id:
            self.request_id = response.accepted.request_id
        is_last = response.HasField("finished")
        self._responses.append(response)
        self._is_ended = is_last
        return is_last

    def fail(self, error: PenstockError, *, is_immediate: bool = False) -> None:
        """End the request with an error. A second error is ignored.

        The error is raised after the messages that were not taken yet; if `is_immediate`, these are
        discarded.
        """
        if self._failure is None:
            self._failure = error
        if is_immediate:
            self._responses.clear()
        self._is_ended = True

    def take(self) -> pb.GenerateResponse | None:
        """Return the next message; None if there is none yet.

        After the last message, raises the error if the request has failed, otherwise EOFError.
        """
        is_ended, failure = self._is_ended, self._failure
        if self._responses:
            response = self._responses.popleft()
            self._num_taken_tokens += response.tokens.num_tokens
            return response
        if failure is not None:
            raise failure
        if is_ended:
            raise EOFError
        return None

    def credit(self) -> pb.MultiplexRequest | None:
        """Return a command that grants credit for the tokens taken since the last such command.

        Returns None while these are fewer than half of the initial credit, and after the request
        has ended.
        """
        num_tokens = self._num_taken_tokens
        if num_tokens < self._min_credit_tokens or self._is_ended:
            return None
        self._num_taken_tokens = 0
        return pb.MultiplexRequest(
            credit=pb.MultiplexCredit(key=self.key, num_credit_tokens=num_tokens)
        )


class MultiplexedRequests:
    """All requests of one Multiplex call. Not thread-safe."""

    def __init__(self, config: MultiplexConfig, *, opened_at_s: float) -> None:
        self._config = config
        self._expires_s = opened_at_s + config.max_call_age_s
        self._requests: dict[int, MultiplexedRequest] = {}
        self._cancelled_keys: set[int] = set()
        self._next_key: int = 1
        self._is_draining = False
        self.has_ended = False

    @property
    def num_open(self) -> int:
        """Number of open requests, without cancelled and expired ones."""
        return len(self._requests)

    def can_submit(self, now_s: float) -> bool:
        """Return whether this call accepts new requests at time `now_s`."""
        return not (self.has_ended or self._is_draining or now_s >= self._expires_s)

    def submit(
        self,
        generation: pb.GenerateRequest,
        *,
        timeout_s: float | None,
        traceparent: str | None,
        wake: Callable[[], None],
    ) -> tuple[MultiplexedRequest, pb.MultiplexRequest]:
        """Register a new request; return it and the command that starts it.

        `timeout_s` becomes the request's total_timeout, unless the request has a shorter one.
        Raises ResourceExhausted for a request that is too large, without effect on other requests.
        """
        key = self._next_key
        self._next_key += 1
        window_tokens = max(self._config.window_tokens, 2 * generation.output.min_chunk_tokens)
        submit = pb.MultiplexSubmit(
            key=key,
            generation=generation,
            num_credit_tokens=window_tokens,
            traceparent=traceparent,
        )
        if timeout_s is not None:
            _limit_deadline(submit.generation, timeout_s)
        command = pb.MultiplexRequest(submit=submit)
        num_bytes = command.ByteSize()
        if num_bytes > self._config.max_request_bytes:
            raise request_too_large(num_bytes, self._config.max_request_bytes)
        request = MultiplexedRequest(key, window_tokens, wake)
        self._requests[key] = request
        return request, command

    def stop(self) -> None:
        """Accept no new requests. Open requests continue."""
        self._is_draining = True

    def receive(self, response: pb.MultiplexResponse) -> None:
        """Distribute the events of one message to their requests. Raises StreamBroken for an
        unknown key."""
        requests = self._requests
        for event in response.events:
            key = event.key
            request = requests.get(key)
            if request is None:
                self._receive_late(event)
            elif event.HasField("response"):
                if request.put(event.response):
                    del requests[key]
                request.wake()
            elif event.HasField("error"):
                del requests[key]
                error = error_from_status(event.error, request_id=request.request_id)
                self._is_draining |= isinstance(error, Draining)
                request.fail(error)
                request.wake()

    def cancel(self, request: MultiplexedRequest) -> pb.MultiplexRequest | None:
        """Cancel this request. Returns the command that cancels it on the server; None
        if it has ended.

        A reader in another thread or task gets CallCancelled.
        """
        return self._cancel_with(request, request_cancelled(request.request_id))

    def expire(self, request: MultiplexedRequest) -> pb.MultiplexRequest | None:
        """Fail a request, because its deadline passed. Returns the command that cancels
        it on the server; None if it has ended."""
        return self._cancel_with(request, deadline_passed(request.request_id))

    def _cancel_with(
        self, request: MultiplexedRequest, error: PenstockError
    ) -> pb.MultiplexRequest | None:
        if self._requests.pop(request.key, None) is None:
            return None
        self._cancelled_keys.add(request.key)
        request.fail(error, is_immediate=True)
        request.wake()
        return pb.MultiplexRequest(cancel=pb.MultiplexCancel(key=request.key))

    def end(self, error: PenstockError) -> None:
        """End the call: open requests fail with `error`, each with its own request id."""
        self.has_ended = True
        requests = tuple(self._requests.values())
        self._requests.clear()
        for request in requests:
            request.fail(error.of_request(request.request_id))
            request.wake()

    def _receive_late(self, event: pb.MultiplexEvent) -> None:
        """Ignore an event of a cancelled or expired request, and remove its key at the last event.
        Raises StreamBroken for any other key."""
        if event.key not in self._cancelled_keys:
            raise StreamBroken.with_message(f"an event of request {event.key}, which is not open")
        if event.HasField("error") or event.response.HasField("finished"):
            self._cancelled_keys.discard(event.key)


def _limit_deadline(generation: pb.GenerateRequest, timeout_s: float) -> None:
    """Set total_timeout to `timeout_s` (at least a nanosecond), unless it is already lower."""
    timeout_ns = max(1, round(timeout_s * 1e9))
    scheduling = generation.scheduling
    if not scheduling.HasField("total_timeout") or (
        timeout_ns < scheduling.total_timeout.ToNanoseconds()
    ):
        duration = Duration()
        duration.FromNanoseconds(timeout_ns)
        scheduling.total_timeout.CopyFrom(duration)
