"""Prompt and output as text, for services whose operators asked to see them in traces.

Owns how much of a text is kept. Nothing here runs unless `FrontConfig.has_content`.
"""

from typing import Final

from penstock.server.front.generation import ChatInput, Generation, TextInput

MAX_CONTENT_BYTES: Final = 4096
_TOKEN_IDS = "[token ids]"


def captured_prompt(generation: Generation) -> str:
    """The beginning of the prompt, as its client sent it."""
    match generation.prompt:
        case TextInput(text=text):
            return cut(text)
        case ChatInput(messages=messages):
            return cut("\n".join(f"{message.role}: {message.content}" for message in messages))
        case _:
            return _TOKEN_IDS


class CapturedText:
    """The beginning of one output, as it was sent."""

    __slots__ = ("_num_bytes", "_texts")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._num_bytes = 0

    def add(self, text: str) -> None:
        """What comes next."""
        if text and self._num_bytes < MAX_CONTENT_BYTES:
            self._texts.append(text)
            self._num_bytes += len(text.encode())

    @property
    def text(self) -> str:
        """What there is."""
        return cut("".join(self._texts))


def cut(text: str) -> str:
    """At most MAX_CONTENT_BYTES of `text`, in whole characters."""
    # No character has less than one byte: most of a long text is not even looked at.
    data = text[:MAX_CONTENT_BYTES].encode()
    return data[:MAX_CONTENT_BYTES].decode(errors="ignore")
