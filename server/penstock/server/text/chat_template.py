"""Renders a chat with the chat template of the model.

Owns the Jinja environment that Hugging Face templates expect, with a sandbox and limits. Does not
tokenize, and does not mark control tokens (`control_tokens.py` does).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.server.text.errors import (
    BadTemplateArgument,
    ChatTemplateError,
    ModelFilesError,
    ToolsUnsupported,
)

_TOOLS: Final = "tools"
_OWN_VARIABLES: Final = frozenset({"messages", _TOOLS, "documents", "add_generation_prompt"})


JsonValue = None | bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call in an earlier message. The message with its result refers to `id`."""

    id: str
    name: str
    arguments: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a chat, as the template receives it. Unset optional fields are empty."""

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    @property
    def text(self) -> str:
        """All text of the message that a template may render, except tool calls (see
        `TemplateData`)."""
        return "".join((self.role, self.content, self.name, self.tool_call_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateData:
    """The template's variables in addition to the messages: `tools`, and all others in `arguments`.

    `num_bytes` is the size of `tools`, `arguments` and the messages' tool calls, encoded as JSON.
    """

    tools: tuple[Mapping[str, JsonValue], ...] = ()
    arguments: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    num_bytes: int = 0


NO_DATA: Final = TemplateData()


class ChatTemplate:
    """A compiled chat template. Thread-safe."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        local_time: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile the template. Raises ModelFilesError if it is not valid Jinja.

        `special_tokens` are variables of the template ("bos_token": "<s>"). `local_time` is the
        clock of the template's function `strftime_now`.
        """
        self._source = source
        self._variables = dict(special_tokens)
        try:
            environment, functions = _environment(), _functions(local_time)
            self._template = environment.from_string(source, globals=functions)
            known = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ModelFilesError(f"chat template: line {error.lineno}: {error.message}") from error
        self.has_tools = _TOOLS in known
        self._arguments = known - _OWN_VARIABLES - {*self._variables, *functions}

    def check(self, messages: Sequence[ChatMessage], data: TemplateData) -> None:
        """Check that the template supports the tools and arguments of a chat.

        Raises ToolsUnsupported if the chat has tools or tool calls and the template does not use
        `tools`. Raises BadTemplateArgument for an argument that the template does not use or that a
        client may not set.
        """
        if not self.has_tools:
            if data.tools:
                raise ToolsUnsupported(_TOOLS)
            for index, message in enumerate(messages):
                if message.tool_calls:
                    raise ToolsUnsupported(f"messages[{index}].tool_calls")
        for name in data.arguments:
            if name not in self._arguments:
                known = ", ".join(sorted(self._arguments)) or "none"
                raise BadTemplateArgument(
                    f"the chat template has no variable {name[:64]!r} to set; it has: {known[:256]}"
                )

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        max_bytes: int,
        data: TemplateData = NO_DATA,
    ) -> str:
        """Return the text of the prompt.

        Raises ChatTemplateError if the template rejects the chat or fails on it, or if the text
        exceeds `max_bytes` in UTF-8. Stops as soon as the text is too long, so that a template
        cannot multiply its input.
        """
        turns = [_turn(message) for message in messages]
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                **data.arguments,
                **self._variables,
                messages=turns,
                tools=list(data.tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > max_bytes:
                    break
        except _TemplateError as error:
            raise ChatTemplateError(self._safe_message(str(error))) from error
        # A template is a program. It may raise any exception for a chat that it does not expect.
        except Exception as error:
            raise ChatTemplateError(
                f"the model's chat template failed on this chat ({type(error).__name__})"
            ) from error
        text = "".join(pieces)
        if num_chars > max_bytes or len(text.encode()) > max_bytes:
            raise ChatTemplateError(f"the rendered chat is longer than {max_bytes} bytes")
        return text

    def _safe_message(self, message: str) -> str:
        """Return the error text for a chat that the template rejects.

        It quotes the message of the template only if the source of the template contains it, so
        that it cannot quote the chat.
        """
        if message and message in self._source:
            return f"the model's chat template rejects this chat: {message[:200]}"
        return "the model's chat template rejects this chat"


def _turn(message: ChatMessage) -> dict[str, object]:
    """Return a message as a dict with only the keys that are set, because templates test whether a
    key exists."""
    turn: dict[str, object] = {"role": message.role, "content": message.content}
    if message.name:
        turn["name"] = message.name
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return turn


class _TemplateError(Exception):
    """The template called `raise_exception`."""


class _GenerationBlocks(Extension):
    """Renders the bodies of `{% generation %}` blocks. Templates mark the model's answers with
    these blocks for training."""

    tags = {"generation"}  # noqa: RUF012  # declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    return environment


def _functions(local_time: Callable[[], datetime]) -> dict[str, object]:
    """Return the functions that templates may call in addition to Jinja's functions."""

    def raise_exception(message: object = "") -> None:
        raise _TemplateError(str(message))

    def strftime_now(pattern: str) -> str:
        return local_time().strftime(pattern)

    return {"raise_exception": raise_exception, "strftime_now": strftime_now}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert `value` to JSON. Unlike Jinja's filter, this does not escape HTML, because models
    were not trained on escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
