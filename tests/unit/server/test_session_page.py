"""docs/sessions.md: its example runs and does what it says."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.client import (
    Accepted,
    ChatMessage,
    ChatPrompt,
    Finished,
    FinishReason,
    Generation,
    GenerationOptions,
    Output,
    OutputEnd,
    Timings,
    Usage,
)

PAGE = (Path(__file__).parents[3] / "docs" / "sessions.md").read_text(encoding="utf-8")


def generation(text: str) -> Generation:
    end = OutputEnd(
        output_index=0,
        finish_reason=FinishReason.STOP,
        stop_string=None,
        stop_token_id=None,
        num_completion_tokens=5,
    )
    return Generation(
        accepted=Accepted(
            sequence=0,
            request_id="r",
            model="m",
            num_prompt_tokens=64,
            seed=1,
            estimated_queue_s=None,
        ),
        prompt=None,
        outputs=(Output(index=0, text=text, records=(), end=end),),
        finished=Finished(
            sequence=1,
            outputs=(end,),
            usage=Usage(num_prompt_tokens=64, num_completion_tokens=5, num_cached_prompt_tokens=48),
            timings=Timings(queue_s=0.0, prefill_s=0.1, ttft_s=0.1, decode_s=0.1, total_s=0.2),
            num_preemptions=0,
        ),
    )


class Answering:
    """A client that answers each turn with the number of its messages; `calls`: what it got."""

    def __init__(self) -> None:
        self.calls: list[tuple[ChatPrompt, Any]] = []

    async def generate_once(
        self, prompt: ChatPrompt, *, deadline_s: float, **options: Any
    ) -> Generation:
        assert deadline_s > 0.0
        assert options.keys() <= GenerationOptions.__annotations__.keys()
        self.calls.append((prompt, options))
        return generation(f"answer to {len(prompt.messages)}")


def test_the_example_carries_a_dialogue_through_its_turns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "sessions.md", "exec"), names)
    client = Answering()
    dialogue: list[ChatMessage] = []

    for question in ("first", "second"):
        asyncio.run(names["turn"](client, dialogue, question))

    assert [(message.role, message.content) for message in dialogue] == [
        ("user", "first"),
        ("assistant", "answer to 1"),
        ("user", "second"),
        ("assistant", "answer to 3"),
    ]
    assert [options["session_id"] for _, options in client.calls] == ["ticket-4711"] * 2
    assert [len(prompt.messages) for prompt, _ in client.calls] == [1, 3]
    assert capsys.readouterr().out.splitlines() == ["48 of 64 found"] * 2
