"""Checks that a stream conforms to the protocol: order, sequence numbers, exactly one end.

Stores the state of a stream, over several attempts if they resume it. Does no I/O: the clients pass
the messages that they have received.
"""

from typing import NoReturn

import penstock.v1 as pb
from penstock.client.decoding import decode_event
from penstock.client.errors import StreamBroken
from penstock.client.events import Accepted, Event, Finished, PromptEcho, Tokens
from penstock.client.resuming import ResumePoint


class StreamReader:
    """Converts the messages of one stream to events, or raises StreamBroken.

    `start` is the position of an earlier reader; None to read from the first message.
    """

    def __init__(self, start: ResumePoint | None = None) -> None:
        self.has_output = False
        """True if tokens or a prompt echo were read, which a retry would deliver again."""
        self._next_sequence: int = 0 if start is None else start.next_sequence
        self._num_tokens: dict[int, int] = {}
        if start is not None:
            self._num_tokens.update(enumerate(start.received_token_counts))
        self.request_id = "" if start is None else start.request_id
        """Id of the request; "" until it is known."""
        self._finished: Finished | None = None

    @property
    def point(self) -> ResumePoint:
        """The position at which to resume.

        A `finished` message counts as received only after a call of `end`.
        """
        num_outputs = max(self._num_tokens, default=-1) + 1
        counts = tuple(self._num_tokens.get(index, 0) for index in range(num_outputs))
        return ResumePoint(
            request_id=self.request_id,
            next_sequence=self._next_sequence,
            received_token_counts=counts,
        )

    def next_point(self) -> ResumePoint:
        """Return the position at which the next attempt resumes.

        Discards a `finished` message whose status was lost, so that it is requested again.
        """
        self._finished = None
        return self.point

    def receive(self, response: pb.GenerateResponse) -> Event | None:
        """Check the next message and return its event; None for `Finished` and for an unknown
        event.

        `Finished` is held back for `end`, because it is valid only if the status is OK. Raises
        StreamBroken for a message that violates the protocol.
        """
        if self._finished is not None:
            self._break("received a message after `finished`")
        if response.sequence != self._next_sequence:
            self._break(f"expected message {self._next_sequence}, got {response.sequence}")
        event = decode_event(response)
        if (self._next_sequence == 0) != isinstance(event, Accepted):
            self._break("`accepted` must be the first message, once")
        if isinstance(event, Finished):
            self._finished = event
            return None
        self._next_sequence += 1
        # Tokens are checked first, because nearly all events are tokens.
        if isinstance(event, Tokens):
            self.has_output = True
            index = event.output_index
            self._num_tokens[index] = self._num_tokens.get(index, 0) + event.num_tokens
        elif isinstance(event, Accepted):
            self.request_id = event.request_id
        elif isinstance(event, PromptEcho):
            self.has_output = True
        return event

    def end(self) -> Finished:
        """End the stream after its call ended with status OK; return its `Finished`. Raises
        StreamBroken if no `Finished` was received."""
        if self._finished is None:
            self._break(f"the stream ended without `finished` after {self._next_sequence} messages")
        self._next_sequence += 1
        return self._finished

    def _break(self, message: str) -> NoReturn:
        raise StreamBroken.with_message(message, self.request_id)
