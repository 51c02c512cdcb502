"""Many requests on one Multiplex call: keys, credit, and the request of each event.

Owns the state of one call, for both clients. Does no I/O and has no clock; each lane has a function
that wakes its reader.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from google.protobuf.duration_pb2 import Duration

import penstock.v1 as pb
from penstock.client.errors import Draining, PenstockError, StreamBroken
from penstock.client.own_failures import deadline_passed, request_cancelled, request_too_large
from penstock.client.status import error_from_status


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiplexConfig:
    """How requests share a Multiplex call. Raises ValueError, which names the field.

    Attributes:
        window_tokens: Output tokens of a request that the server may send before they are read
            from its iterator; at least twice `min_chunk_tokens`. It limits the memory for a slow
            reader, and should exceed the tokens generated in one round trip.
        max_call_age_s: New requests take a new call after this many seconds, so that no call
            exceeds the maximum connection age of the server, 1800 s within a tenth.
        max_request_bytes: A larger request fails and is not sent: it would end the call for all
            requests. At most the server's `ModelLimits.max_message_bytes`.
    """

    window_tokens: int = 256
    max_call_age_s: float = 1200.0
    max_request_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
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
    """Return how to share calls, from a client's argument; None: no sharing.

    `multiplex` True: the defaults. `max_message_bytes`: the limit of the channel.
    """
    if not multiplex:
        return None
    config = MultiplexConfig() if multiplex is True else multiplex
    return replace(config, max_request_bytes=min(config.max_request_bytes, max_message_bytes))


class Lane:
    """One request on a call: events that are received and not yet taken, its credit, its end.

    One thread adds and another takes; this is safe because `take` checks for the end before it
    checks for earlier messages.
    """

    __slots__ = (
        "_failure",
        "_is_ended",
        "_num_taken_tokens",
        "_responses",
        "_top_up_tokens",
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
        self._top_up_tokens = max(1, window_tokens // 2)

    @property
    def num_waiting(self) -> int:
        """Number of messages not yet taken."""
        return len(self._responses)

    def put(self, response: pb.GenerateResponse) -> bool:
        """Add a message; return whether it was the last."""
        if not self.request_id:
            self.request_id = response.accepted.request_id
        is_last = response.HasField("finished")
        self._responses.append(response)
        self._is_ended = is_last
        return is_last

    def fail(self, error: PenstockError, *, is_urgent: bool = False) -> None:
        """End with an error, after earlier messages unless it is urgent; the first error counts."""
        if self._failure is None:
            self._failure = error
        if is_urgent:
            self._responses.clear()
        self._is_ended = True

    def take(self) -> pb.GenerateResponse | None:
        """Return the next message, None if there is none yet. Raises the failure, EOFError at the
        end.
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
        """Return credit for the tokens taken; None until it is enough for a message."""
        num_tokens = self._num_taken_tokens
        if num_tokens < self._top_up_tokens or self._is_ended:
            return None
        self._num_taken_tokens = 0
        return pb.MultiplexRequest(
            credit=pb.MultiplexCredit(key=self.key, num_credit_tokens=num_tokens)
        )


class Lanes:
    """All requests of one Multiplex call. Not thread-safe."""

    def __init__(self, config: MultiplexConfig, *, opened_at_s: float) -> None:
        self._config = config
        self._expires_s = opened_at_s + config.max_call_age_s
        self._lanes: dict[int, Lane] = {}
        self._left: set[int] = set()
        self._next_key: int = 1
        self._is_draining = False
        self.has_ended = False

    @property
    def num_open(self) -> int:
        """Number of open requests with a reader."""
        return len(self._lanes)

    def can_submit(self, now_s: float) -> bool:
        """Return whether this call accepts new requests."""
        return not (self.has_ended or self._is_draining or now_s >= self._expires_s)

    def submit(
        self,
        generation: pb.GenerateRequest,
        *,
        timeout_s: float | None,
        traceparent: str | None,
        wake: Callable[[], None],
    ) -> tuple[Lane, pb.MultiplexRequest]:
        """Open a lane; return it and the command that starts its request.

        `timeout_s` becomes the request's total_timeout, unless the request has an earlier one.

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
        lane = Lane(key, window_tokens, wake)
        self._lanes[key] = lane
        return lane, command

    def stop(self) -> None:
        """Accept no new requests."""
        self._is_draining = True

    def receive(self, response: pb.MultiplexResponse) -> None:
        """Distribute the events of one message. Raises StreamBroken for an unknown key."""
        lanes = self._lanes
        for event in response.events:
            key = event.key
            lane = lanes.get(key)
            if lane is None:
                self._receive_late(event)
            elif event.HasField("response"):
                if lane.put(event.response):
                    del lanes[key]
                lane.wake()
            elif event.HasField("error"):
                del lanes[key]
                error = error_from_status(event.error, request_id=lane.request_id)
                self._is_draining |= isinstance(error, Draining)
                lane.fail(error)
                lane.wake()

    def leave(self, lane: Lane) -> pb.MultiplexRequest | None:
        """Abandon this lane; return the command that cancels its request, if it is still open.

        A reader in another thread or task gets CallCancelled.
        """
        return self._drop(lane, request_cancelled(lane.request_id))

    def expire(self, lane: Lane) -> pb.MultiplexRequest | None:
        """Fail a lane whose deadline passed; return the command that cancels it, if open."""
        return self._drop(lane, deadline_passed(lane.request_id))

    def _drop(self, lane: Lane, error: PenstockError) -> pb.MultiplexRequest | None:
        if self._lanes.pop(lane.key, None) is None:
            return None
        self._left.add(lane.key)
        lane.fail(error, is_urgent=True)
        lane.wake()
        return pb.MultiplexRequest(cancel=pb.MultiplexCancel(key=lane.key))

    def end(self, error: PenstockError) -> None:
        """End the call: open requests fail, each with its request id."""
        self.has_ended = True
        lanes = tuple(self._lanes.values())
        self._lanes.clear()
        for lane in lanes:
            lane.fail(error.of_request(lane.request_id))
            lane.wake()

    def _receive_late(self, event: pb.MultiplexEvent) -> None:
        """Receive an event of an abandoned request; drop its entry once it ends."""
        if event.key not in self._left:
            raise StreamBroken.because(f"an event of request {event.key}, which is not open")
        if event.HasField("error") or event.response.HasField("finished"):
            self._left.discard(event.key)


def _limit_deadline(generation: pb.GenerateRequest, timeout_s: float) -> None:
    """Set total_timeout to the earlier of its value and `timeout_s`, at least a nanosecond."""
    timeout_ns = max(1, round(timeout_s * 1e9))
    scheduling = generation.scheduling
    if not scheduling.HasField("total_timeout") or (
        timeout_ns < scheduling.total_timeout.ToNanoseconds()
    ):
        duration = Duration()
        duration.FromNanoseconds(timeout_ns)
        scheduling.total_timeout.CopyFrom(duration)
