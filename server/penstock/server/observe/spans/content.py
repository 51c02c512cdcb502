"""Prompt and outputs as the GenAI conventions write messages; only where content capture is on.

Source of the form: semantic conventions 1.41.1, `gen_ai.input.messages` and
`gen_ai.output.messages`; as JSON text, which every store of traces can show.
"""

import json
from collections.abc import Sequence


def input_messages(prompt: str) -> str:
    """The prompt as one message of the user: roles were folded into it by the chat template."""
    return _to_json([_message("user", prompt)])


def output_messages(outputs: Sequence[str], finish_reasons: Sequence[str]) -> str:
    """One message for each output; its reason where there is one."""
    messages = [_message("assistant", text) for text in outputs]
    for message, reason in zip(messages, finish_reasons, strict=False):
        message["finish_reason"] = reason
    return _to_json(messages)


def _message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _to_json(messages: list[dict[str, object]]) -> str:
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":"))
