"""Checks that a stream conforms to the contract: order, sequence numbers, exactly one end.

Owns the state of a stream, over several attempts if they resume it. Does no I/O: the clients pass
the messages that they read.
"""

from typing import NoReturn

import penstock.v1 as pb
from penstock.client.decoding import decode_event
from penstock.client.errors import StreamBroken
from penstock.client.events import Accepted, Event, Finished, PromptEcho, Tokens
from penstock.client.resuming import ResumePoint


class StreamReader:
    """Turns the messages of one stream into events, or raises StreamBroken.

    `start`: the position of an earlier reader; None reads from the first message.
    """

    def __init__(self, start: ResumePoint | None = None) -> None:
        self.has_output = False
        """Whether any output was read: from then on the call must not be tried again."""
        self._next_sequence: int = 0 if start is None else start.next_sequence
        self._num_tokens: dict[int, int] = {}
        if start is not None:
            self._num_tokens.update(enumerate(start.received_token_counts))
        self.request_id = "" if start is None else start.request_id
        """The request, once the server sent its id."""
        self._finished: Finished | None = None

    @property
    def point(self) -> ResumePoint:
        """Where to resume; a `finished` message is included only if the call ended with OK."""
        num_outputs = max(self._num_tokens, default=-1) + 1
        counts = tuple(self._num_tokens.get(index, 0) for index in range(num_outputs))
        return ResumePoint(
            request_id=self.request_id,
            next_sequence=self._next_sequence,
            received_token_counts=counts,
        )

    def next_point(self) -> ResumePoint:
        """Return where the next attempt resumes: before a `finished` whose status was lost."""
        self._finished = None
        return self.point

    def receive(self, response: pb.GenerateResponse) -> Event | None:
        """Check the next message; return the event to deliver now, None for none.

        `Finished` is held back for `end`: it counts only once the status is OK.
        """
        if self._finished is not None:
            self._break("a message came after `finished`")
        if response.sequence != self._next_sequence:
            self._break(f"expected message {self._next_sequence}, got {response.sequence}")
        event = decode_event(response)
        if (self._next_sequence == 0) != isinstance(event, Accepted):
            self._break("`accepted` must come first, and once")
        if isinstance(event, Finished):
            self._finished = event
            return None
        self._next_sequence += 1
        # Tokens first, because nearly all events are tokens.
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
        """End the stream with status OK; return the last event. Raises StreamBroken without one."""
        if self._finished is None:
            self._break(f"the stream ended without `finished` after {self._next_sequence} messages")
        self._next_sequence += 1
        return self._finished

    def _break(self, message: str) -> NoReturn:
        raise StreamBroken.because(message, self.request_id)
