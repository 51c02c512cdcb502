"""Prompt and output texts for traces, when the operator has enabled them.

Owns how much of a text is kept. Not used unless `FrontConfig.has_content`.
"""

from typing import Final

from penstock.server.front.generation import ChatInput, Generation, TextInput

MAX_CONTENT_BYTES: Final = 4096
_TOKEN_IDS = "[token ids]"


def captured_prompt(generation: Generation) -> str:
    """The start of the prompt, as its client sent it."""
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
    """At most MAX_CONTENT_BYTES of `text`, in whole characters."""
    # A character has at least one byte, so most of a long text need not be encoded.
    data = text[:MAX_CONTENT_BYTES].encode()
    return data[:MAX_CONTENT_BYTES].decode(errors="ignore")
