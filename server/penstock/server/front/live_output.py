"""One output of a live request.

Owns what was delivered of one output. Its request interprets the events.
"""

from array import array
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from penstock.server.front.content import CapturedText
from penstock.server.front.events import OutputEnd
from penstock.server.front.stream import TokenStream
from penstock.server.text.text_stream import TextStream

RequestT = TypeVar("RequestT")


def _no_tokens() -> "array[int]":
    return array("i")


@dataclass(slots=True, eq=False)
class LiveOutput(Generic[RequestT]):
    """One output of a request: its text, and how it ended. `stream`: its request's.

    `is_plain`: for its next token `on_token` would only push the text. `captured`: its text for
    traces. `token_ids`: all its tokens, four bytes each, from which another engine continues.
    `num_repeating`: how many of the last of them the current engine will generate again before new
    ones.
    """

    request: RequestT
    index: int
    key: int
    text: TextStream
    stream: TokenStream
    end: OutputEnd | None = None
    is_live: bool = True
    is_plain: bool = False
    is_running: bool = False
    num_preemptions: int = 0
    captured: CapturedText | None = None
    token_ids: "array[int]" = field(default_factory=_no_tokens)
    num_repeating: int = 0

    def repeats(self, token_id: int) -> bool:
        """Whether the next token equals the one before the replay. Only while `num_repeating`."""
        is_same = self.token_ids[-self.num_repeating] == token_id
        self.num_repeating -= 1
        return is_same
