"""Functions that edit fields of a request with a text prompt, for tests of request mapping."""

from collections.abc import Callable
from typing import Any

from google.protobuf.duration_pb2 import Duration

from penstock.v1.generation_service_pb2 import GenerateRequest
from support.generate_requests import text_request

Edit = Callable[[GenerateRequest], object]


def edited(edit: Edit) -> GenerateRequest:
    message = text_request()
    edit(message)
    return message


def merging(**fields: Any) -> Edit:
    """Return an edit that merges these fields into the message. Values may be anything that the
    message's constructor accepts, such as nested dictionaries and lists.
    """
    return lambda message: message.MergeFrom(GenerateRequest(**fields))


def given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def put(group: str, field: str, value: object) -> Edit:
    return merging(**{group: {field: value}})


def add(group: str, field: str, *values: object) -> Edit:
    return merging(**{group: {field: values}})


def chunk_delay(seconds: int, nanos: int) -> Edit:
    delay = Duration(seconds=seconds, nanos=nanos)
    return lambda message: message.output.max_chunk_delay.CopyFrom(delay)


def bias(*entries: tuple[int, float]) -> Edit:
    pairs = [{"token_id": token_id, "bias": value} for token_id, value in entries]
    return put("sampling", "logit_bias", pairs)


def tokens(*ids: int) -> Edit:
    return merging(token_prompt={"ids": ids})


def chat(
    *turns: tuple[str, str],
    add_generation_prompt: bool | None = None,
    window_tokens: int | None = None,
) -> Edit:
    messages = [{"role": role, "parts": [{"text": content}]} for role, content in turns]
    options = given(add_generation_prompt=add_generation_prompt, window_tokens=window_tokens)
    return merging(chat_prompt={"messages": messages, **options})


def duration(field: str, seconds: int, nanos: int = 0) -> Edit:
    return put("scheduling", field, {"seconds": seconds, "nanos": nanos})


def retention(*, level: int | None = None, seconds: int | None = None) -> Edit:
    wait = None if seconds is None else {"seconds": seconds}
    return put("cache", "retention", given(level=level, duration=wait))


def schema(text: str) -> Edit:
    return put("constraint", "json_schema", {"schema": text})


def regex(pattern: str) -> Edit:
    return put("constraint", "regex", {"pattern": pattern})


def grammar(ebnf: str) -> Edit:
    return put("constraint", "grammar", {"ebnf": ebnf})


def choices(*texts: str) -> Edit:
    return put("constraint", "choice", {"choices": texts})


def adapter(name: str | None, scale: float | None = None) -> Edit:
    return merging(adapter=given(name=name, scale=scale))


def nested(depth: int) -> str:
    """Return a schema of `depth` nested objects."""
    return '{"not":' * (depth - 1) + "{}" + "}" * (depth - 1)
