"""Builders of the generation requests that tests send."""

from collections.abc import Iterable
from typing import Any

from penstock.v1 import generation_service_pb2 as pb
from penstock.v1.prompt_pb2 import TextPrompt


def text_request(text: str = "hello", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text_prompt=TextPrompt(text=text), **fields)


def limited(
    text: str = "hello", *, max_tokens: int = 20, request_id: str | None = None
) -> pb.GenerateRequest:
    """Return a seeded request with a text prompt and at most `max_tokens` output tokens."""
    return text_request(
        text, request_id=request_id, stopping={"max_tokens": max_tokens}, sampling={"seed": 1}
    )


def greedy(
    num_tokens: int = 3, prompt: Iterable[int] = (5, 6, 7, 8), **fields: Any
) -> pb.GenerateRequest:
    """Return a greedy request of exactly `num_tokens` output tokens. `fields`: other fields of the
    message.
    """
    given: dict[str, Any] = {
        "token_prompt": {"ids": prompt},
        "sampling": {"temperature": 0.0},
        "stopping": {"max_tokens": num_tokens, "ignore_eos": True},
    }
    return pb.GenerateRequest(**given | fields)
