"""Determines from which position, and for how long, a client tries to resume a stream after its
connection was lost.

Defines the position of a stream, as a value that a program may store, and tracks the lost
connections of one stream. Does no I/O and does not sleep.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import penstock.v1 as pb
from penstock.client.encoding import filled
from penstock.client.errors import EngineDown, PenstockError, RequestNotFound, Unavailable
from penstock.client.errors import StreamBroken as Broken
from penstock.client.events import Accepted, Event, Tokens

_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The position of a reader in a request's stream, from which another process can continue it.

    Raises ValueError for negative numbers.

    Attributes:
        request_id: The id of the request.
        next_sequence: `sequence` of the next message.
        received_token_counts: Number of tokens received of each output, by `output_index`.
    """

    request_id: str
    next_sequence: int = 0
    received_token_counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, if one is negative."""
        if self.next_sequence < 0:
            raise ValueError(f"next_sequence: must not be negative, not {self.next_sequence}")
        if any(count < 0 for count in self.received_token_counts):
            raise ValueError("received_token_counts: must not be negative")

    def after(self, event: Event) -> "ResumePoint":
        """Return the position after an event of the stream."""
        counts = list(self.received_token_counts)
        request_id = self.request_id
        if isinstance(event, Accepted):
            request_id = event.request_id
        elif isinstance(event, Tokens):
            counts += [0] * (event.output_index + 1 - len(counts))
            counts[event.output_index] += event.num_tokens
        return replace(
            self,
            request_id=request_id,
            next_sequence=event.sequence + 1,
            received_token_counts=tuple(counts),
        )

    def message(self) -> pb.ResumeRequest:
        """Return the message that requests the remaining events."""
        message = pb.ResumeRequest(received_token_counts=self.received_token_counts)
        return filled(message, request_id=self.request_id, next_sequence=self.next_sequence)


class Recovery:
    """Tracks the lost connections of one stream. After each loss, the client tries to resume for
    `resume_timeout_s` seconds.

    If `resume_timeout_s` is 0, every loss is raised as an error. `is_resuming` is True if the next
    attempt is a Resume.
    """

    def __init__(
        self, resume_timeout_s: float, *, clock: Callable[[], float], random: Callable[[], float]
    ) -> None:
        self.is_resuming = False
        self._resume_timeout_s = resume_timeout_s
        self._clock = clock
        self._random = random
        self._first: PenstockError | None = None
        self._lost_at_s = math.nan
        self._sequence = -1
        self._num_failed = 0

    def begin_at(self, next_sequence: int) -> None:
        """Begin with a Resume: the first attempt resumes the stream at `next_sequence`."""
        self.is_resuming = True
        self._sequence = next_sequence

    @property
    def is_possible(self) -> bool:
        """True if resuming is enabled (`resume_timeout_s` > 0). `delay_after` decides for each
        error whether the stream is resumed.
        """
        return self._resume_timeout_s > 0

    def delay_after(
        self, error: PenstockError, *, request_id: str, next_sequence: int
    ) -> float | None:
        """Return the seconds to wait before the stream is resumed; None if it cannot be resumed
        after this error, or no longer within the `resume_timeout_s` seconds.

        `request_id` is "" before the first message from the server, when there is nothing to
        resume.
        """
        has_continued = next_sequence > self._sequence
        # If a Resume fails with EngineDown before a new message, no engine that has the stream is
        # running, and the Resume is repeated. After a new message, EngineDown means that the
        # request itself has failed.
        is_out_of_reach = self.is_resuming and not has_continued and isinstance(error, EngineDown)
        if not self.is_possible or not request_id or not (is_loss(error) or is_out_of_reach):
            self.is_resuming = False
            return None
        now_s = self._clock()
        if self._first is None or has_continued:
            # The stream was resumed meanwhile, so this is a new loss with its own resume timeout.
            self._first, self._lost_at_s, self._num_failed = error, now_s, 0
        self._sequence = next_sequence
        self.is_resuming = True
        backoff_s = min(_MAX_DELAY_S, math.ldexp(_FIRST_DELAY_S, min(self._num_failed, 10)))
        self._num_failed += 1
        delay_s = max(backoff_s * (0.5 + 0.5 * self._random()), error.retry_after_s or 0.0)
        if now_s + delay_s > self._lost_at_s + self._resume_timeout_s:
            self.is_resuming = False
            return None
        return delay_s

    def explain(self, error: PenstockError) -> PenstockError:
        """Return the error to raise for a failed attempt: the error of the lost connection instead
        of a RequestNotFound that follows it, otherwise `error`."""
        if isinstance(error, RequestNotFound) and self._first is not None:
            return self._first
        return error


def is_loss(error: PenstockError) -> bool:
    """Return True if the request may still be live although its stream was lost."""
    return isinstance(error, Unavailable | Broken) and not isinstance(error, EngineDown)
