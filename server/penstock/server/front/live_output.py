"""One output of a live request.

Owns what was delivered of one output, the parts of a request that affect detokenising, and how much
text is kept for traces (`FrontConfig.has_content`). Its request interprets the events.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from penstock.server.front.events import OutputEnd
from penstock.server.front.generation import ChatInput, Generation, TextInput
from penstock.server.front.stream import TokenStream
from penstock.server.text.model_text import ModelText
from penstock.server.text.text_stream import StopStrings, TextStream

RequestT = TypeVar("RequestT")


MAX_CONTENT_BYTES: Final = 4096
_TOKEN_IDS = "[token ids]"


def captured_prompt(generation: Generation) -> str:
    """Return the start of the prompt, as its client sent it."""
    match generation.prompt:
        case TextInput(text=text):
            return cut(text)
        case ChatInput(messages=messages):
            return cut("\n".join(f"{message.role}: {message.content}" for message in messages))
        case _:
            return _TOKEN_IDS


class CapturedText:
    """The start of one output, as it was sent."""

    __slots__ = ("_num_bytes", "_texts")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._num_bytes = 0

    def add(self, text: str) -> None:
        """Append the next text."""
        if text and self._num_bytes < MAX_CONTENT_BYTES:
            self._texts.append(text)
            self._num_bytes += len(text.encode())

    @property
    def text(self) -> str:
        """The text so far."""
        return cut("".join(self._texts))


def cut(text: str) -> str:
    """Return at most MAX_CONTENT_BYTES of `text`, in whole characters."""
    # A character has at least one byte, so most of a long text need not be encoded.
    data = text[:MAX_CONTENT_BYTES].encode()
    return data[:MAX_CONTENT_BYTES].decode(errors="ignore")


def _no_tokens() -> "array[int]":
    return array("i")


@dataclass(slots=True, eq=False)
class LiveOutput(Generic[RequestT]):
    """One output of a request: its text, and how it ended. `stream`: its request's stream.

    `is_plain`: for its next token `on_token` would only push the text. `captured`: its text for
    traces. `token_ids`: all its tokens, four bytes each, from which another engine continues.
    `num_repeating`: how many of the last tokens the current engine will generate again before new
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
        """Consume one repeated token; return whether it is the same. Only while `num_repeating`."""
        is_same = self.token_ids[-self.num_repeating] == token_id
        self.num_repeating -= 1
        return is_same


def output_texts(
    generation: Generation, text: ModelText, stop_ids: Iterable[int]
) -> list[TextStream]:
    """Create a text stream for each output. `stop_ids`: all stop token ids, the model's own
    included.
    """
    stopping = generation.stopping
    ending = frozenset(stop_ids)
    stops = StopStrings(stopping.stop_strings) if stopping.stop_strings else None
    return [
        text.new_stream(
            stops=stops,
            include_stop_string=stopping.include_stop_string,
            min_tokens=stopping.min_tokens,
            stop_ids=ending,
            is_continuation=not isinstance(generation.prompt, ChatInput),
        )
        for _ in range(generation.sampling.num_outputs)
    ]
