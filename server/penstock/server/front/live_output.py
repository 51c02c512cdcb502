"""One of the outputs of a request, as its front knows it.

Owns what one output has told so far. What its events mean is its request's business.
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
    """One of the outputs of a request: its text, and how it ended. `stream`: its request's.

    `is_plain`: with its next token `on_token` would push the text and do nothing else. `captured`:
    its text as it was sent, where that is to be told. `token_ids`: all that came of it, four bytes
    each, from which another engine goes on. `num_repeating`: so many of those, the last ones, the
    engine that runs now has still to tell again before it comes to new ones.
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
        """Whether the next token is what it was before. Only while `num_repeating`."""
        is_same = self.token_ids[-self.num_repeating] == token_id
        self.num_repeating -= 1
        return is_same
