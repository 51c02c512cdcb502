"""Requests for mapping tests: a plain one, and edits of single fields."""

from __future__ import annotations

from collections.abc import Callable

from penstock.v1.generation_service_pb2 import GenerateRequest
from penstock.v1.prompt_pb2 import ContentPart

Edit = Callable[[GenerateRequest], object]


def base() -> GenerateRequest:
    message = GenerateRequest()
    message.text_prompt.text = "hello"
    return message


def edited(edit: Edit) -> GenerateRequest:
    message = base()
    edit(message)
    return message


def put(group: str, field: str, value: object) -> Edit:
    def edit(message: GenerateRequest) -> None:
        setattr(getattr(message, group), field, value)

    return edit


def add(group: str, field: str, *values: object) -> Edit:
    def edit(message: GenerateRequest) -> None:
        getattr(getattr(message, group), field).extend(values)

    return edit


def chunk_delay(seconds: int, nanos: int) -> Edit:
    def edit(message: GenerateRequest) -> None:
        message.output.max_chunk_delay.seconds = seconds
        message.output.max_chunk_delay.nanos = nanos

    return edit


def bias(*entries: tuple[int, float]) -> Edit:
    def edit(message: GenerateRequest) -> None:
        for token_id, value in entries:
            message.sampling.logit_bias.add(token_id=token_id, bias=value)

    return edit


def tokens(*ids: int) -> Edit:
    return lambda message: message.token_prompt.ids.extend(ids)


def chat(
    *turns: tuple[str, str],
    add_generation_prompt: bool | None = None,
    window_tokens: int | None = None,
) -> Edit:
    def edit(message: GenerateRequest) -> None:
        message.chat_prompt.SetInParent()
        if window_tokens is not None:
            message.chat_prompt.window_tokens = window_tokens
        if add_generation_prompt is not None:
            message.chat_prompt.add_generation_prompt = add_generation_prompt
        for role, content in turns:
            message.chat_prompt.messages.add(role=role, parts=[ContentPart(text=content)])

    return edit


def duration(field: str, seconds: int, nanos: int = 0) -> Edit:
    def edit(message: GenerateRequest) -> None:
        value = getattr(message.scheduling, field)
        value.seconds, value.nanos = seconds, nanos
        value.SetInParent()

    return edit


def retention(*, level: int | None = None, seconds: int | None = None) -> Edit:
    def edit(message: GenerateRequest) -> None:
        message.cache.retention.SetInParent()
        if level is not None:
            message.cache.retention.level = level
        if seconds is not None:
            message.cache.retention.duration.seconds = seconds
            message.cache.retention.duration.SetInParent()

    return edit


def schema(text: str) -> Edit:
    return lambda message: setattr(message.constraint.json_schema, "schema", text)


def regex(pattern: str) -> Edit:
    return lambda message: setattr(message.constraint.regex, "pattern", pattern)


def grammar(ebnf: str) -> Edit:
    return lambda message: setattr(message.constraint.grammar, "ebnf", ebnf)


def choices(*texts: str) -> Edit:
    def edit(message: GenerateRequest) -> None:
        message.constraint.choice.SetInParent()
        message.constraint.choice.choices.extend(texts)

    return edit


def adapter(name: str | None, scale: float | None = None) -> Edit:
    def edit(message: GenerateRequest) -> None:
        message.adapter.SetInParent()
        if name is not None:
            message.adapter.name = name
        if scale is not None:
            message.adapter.scale = scale

    return edit


def nested(depth: int) -> str:
    """Return a schema of `depth` nested objects."""
    return '{"not":' * (depth - 1) + "{}" + "}" * (depth - 1)
