"""One output of a live request.

Also creates the text streams of the outputs, and truncates the prompts and outputs that are
recorded for traces (`FrontConfig.has_content`). `live_request.py` applies the engine's events.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from penstock.server.front.events import OutputEnd
from penstock.server.front.generation import ChatInput, GenerationSpec, TextInput
from penstock.server.front.stream import TokenStream
from penstock.server.text.model_text import ModelText
from penstock.server.text.text_stream import StopStrings, TextStream

RequestT = TypeVar("RequestT")


MAX_CONTENT_BYTES: Final = 4096
_TOKEN_IDS = "[token ids]"


def captured_prompt(generation: GenerationSpec) -> str:
    """Return the start of the prompt as text, for traces; for token ids a fixed placeholder."""
    match generation.prompt:
        case TextInput(text=text):
            return truncated(text)
        case ChatInput(messages=messages):
            return truncated(
                "\n".join(f"{message.role}: {message.content}" for message in messages)
            )
        case _:
            return _TOKEN_IDS


class CapturedText:
    """The start of one output as sent to the client, for traces."""

    __slots__ = ("_num_bytes", "_texts")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._num_bytes = 0

    def add(self, text: str) -> None:
        """Append the next text of the output, until MAX_CONTENT_BYTES are reached."""
        if text and self._num_bytes < MAX_CONTENT_BYTES:
            self._texts.append(text)
            self._num_bytes += len(text.encode())

    @property
    def text(self) -> str:
        """The captured text so far."""
        return truncated("".join(self._texts))


def truncated(text: str) -> str:
    """Return the start of `text` in whole characters, at most MAX_CONTENT_BYTES bytes long."""
    # A character has at least one byte, so only the start of a long text needs to be encoded.
    data = text[:MAX_CONTENT_BYTES].encode()
    return data[:MAX_CONTENT_BYTES].decode(errors="ignore")


def _no_tokens() -> "array[int]":
    return array("i")


@dataclass(slots=True, eq=False)
class LiveOutput(Generic[RequestT]):
    """One output of a request: its text, and its end.

    Attributes:
        key: The number of the output in the engine; an engine restart may change it.
        text: Converts the tokens to text.
        stream: The stream of the request.
        end: The end as reported to the client; None until the output has ended.
        is_live: True until the output has ended or failed here.
        is_running: True while the output has a slot in the batch.
        is_plain: True if only the text of the next token must be pushed to the stream, so that
            `LiveRequest.on_token` can be skipped.
        captured: The text recorded for traces; None if it is not recorded.
        token_ids: All tokens of the output so far, after which another engine continues.
        num_repeating: Number of tokens at the end of `token_ids` that the current engine still
            generates again before it generates new ones.
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
        """Compare `token_id` with the earlier token at the same position of a repeated output.

        Returns True if they are equal. Decrements `num_repeating`, which must be above 0.
        """
        is_same = self.token_ids[-self.num_repeating] == token_id
        self.num_repeating -= 1
        return is_same


def output_texts(
    generation: GenerationSpec, text: ModelText, stop_ids: Iterable[int]
) -> list[TextStream]:
    """Return a new text stream for each output. `stop_ids` are all stop token ids, including the
    stop token ids of the model."""
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
