"""Checks that a stream keeps the contract: order, sequence numbers, exactly one end.

Owns what was seen of one attempt's stream. Does no I/O: the clients feed it what they read.
"""

from typing import NoReturn

import penstock.v1 as pb
from penstock.client.decoding import decode_event
from penstock.client.errors import StreamBroken
from penstock.client.events import Accepted, Event, Finished, PromptEcho, Tokens


class StreamReader:
    """Turns the messages of one stream into events, or raises StreamBroken."""

    def __init__(self) -> None:
        self.has_output = False
        """Whether any output was read: from then on the call must not be tried again."""
        self._next_sequence: int = 0
        self.request_id = ""
        """The request, once the server told."""
        self._finished: Finished | None = None

    def receive(self, response: pb.GenerateResponse) -> Event | None:
        """Take the next message; the event to deliver now, None for none.

        `Finished` is held back for `end`: it counts only once the status is OK.
        """
        if response.sequence != self._next_sequence:
            self._break(f"expected message {self._next_sequence}, got {response.sequence}")
        if self._finished is not None:
            self._break("a message came after `finished`")
        event = decode_event(response)
        if (self._next_sequence == 0) != isinstance(event, Accepted):
            self._break("`accepted` must come first, and once")
        self._next_sequence += 1
        # Tokens first, because nearly all events are that.
        if isinstance(event, Tokens):
            self.has_output = True
        elif isinstance(event, Accepted):
            self.request_id = event.request_id
        elif isinstance(event, PromptEcho):
            self.has_output = True
        elif isinstance(event, Finished):
            self._finished = event
            return None
        return event

    def end(self) -> Finished:
        """The stream ended with status OK: the last event. Raises StreamBroken if there is none."""
        if self._finished is None:
            self._break(f"the stream ended without `finished` after {self._next_sequence} messages")
        return self._finished

    def _break(self, message: str) -> NoReturn:
        raise StreamBroken.because(message, self.request_id)
