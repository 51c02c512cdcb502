"""The Python scenarios about responses: streams, prompts, text and metadata."""

from __future__ import annotations

import asyncio
import secrets

from conformance.python_scenario import (
    CALL_S,
    PROMPT,
    Check,
    CheckedStream,
    ScenarioInput,
    greedy,
    new_id,
    require,
)
from penstock.client import ChatMessage, FinishReason, TraceContext

NUM_LARGE_TOKENS = 100_000
_TEXT = "naïve 日本語 🚀"


async def stream_in_order(scenario: ScenarioInput) -> None:
    async with scenario.client() as client:
        checked = CheckedStream(client.generate(PROMPT, deadline_s=CALL_S, **greedy(12)))
        finished = await checked.until_end()
    accepted = await checked.until_accepted()
    require(bool(accepted.request_id and accepted.model), f"accepted without names: {accepted}")
    require(checked.num_tokens == 12, f"{checked.num_tokens} tokens, not 12")
    num_reported = finished.usage.num_completion_tokens
    require(num_reported == 12, f"usage reports {num_reported} tokens, not 12")
    reason = checked.finish_reason
    require(reason is FinishReason.LENGTH, f"the reason is {reason}, not LENGTH")


async def once_equals_stream(scenario: ScenarioInput) -> None:
    async with scenario.client() as client:
        checked = CheckedStream(client.generate(PROMPT, deadline_s=CALL_S, **greedy(32)))
        await checked.until_end()
        once = await client.generate_once(PROMPT, deadline_s=CALL_S, **greedy(32))
    require(once.text == checked.text, f"{once.text!r} is not {checked.text!r}")
    require(bool(once.text), "there is no text")


async def token_prompt(scenario: ScenarioInput) -> None:
    ids = list(range(5, 25))
    answers: list[list[int]] = []
    async with scenario.client() as client:
        for _ in range(2):
            events = client.generate(ids, deadline_s=CALL_S, **greedy(12, return_token_ids=True))
            checked = CheckedStream(events)
            finished = await checked.until_end()
            num_reported = finished.usage.num_prompt_tokens
            require(
                num_reported == len(ids),
                f"usage reports {num_reported} prompt tokens, not {len(ids)}",
            )
            answers.append(checked.token_ids)
    first, second = answers
    require(len(first) == 12, f"{len(first)} token ids, not 12")
    require(first == second, f"{first} the first time, {second} the second")


async def chat(scenario: ScenarioInput) -> None:
    messages = (
        ChatMessage(role="system", content="You answer in one sentence."),
        ChatMessage(role="user", content="Where is the Globe?"),
    )
    async with scenario.client() as client:
        checked = CheckedStream(client.chat(messages, deadline_s=CALL_S, **greedy(24)))
        await checked.until_end()
    require(bool(checked.text), "there is no text")
    require(checked.num_tokens == 24, f"{checked.num_tokens} tokens, not 24")


async def utf8_across_chunks(scenario: ScenarioInput) -> None:
    async with scenario.client() as client:
        events = client.generate(_TEXT, deadline_s=CALL_S, **greedy(200, min_chunk_tokens=1))
        checked = CheckedStream(events)
        once, _ = await asyncio.gather(
            client.generate_once(_TEXT, deadline_s=CALL_S, **greedy(200, echo=True)),
            checked.until_end(),
        )
    echoed = once.prompt.text if once.prompt is not None else None
    require(echoed == _TEXT, f"the prompt came back as {echoed!r}")
    require(checked.text == once.text, f"{checked.text!r} is not {once.text!r}")
    require(not checked.text.isascii(), "the text has no character beyond ASCII")
    for chunk in checked.chunks:
        chunk.text.encode()  # a lone surrogate has no UTF-8


async def large_prompt(scenario: ScenarioInput) -> None:
    ids = [5 + number % 1000 for number in range(NUM_LARGE_TOKENS)]
    async with scenario.client() as client:
        checked = CheckedStream(client.generate(ids, deadline_s=CALL_S, **greedy(4)))
        finished = await checked.until_end()
    num_reported = finished.usage.num_prompt_tokens
    require(num_reported == NUM_LARGE_TOKENS, f"usage reports {num_reported} prompt tokens")
    require(checked.num_tokens == 4, f"{checked.num_tokens} tokens, not 4")


async def metadata(scenario: ScenarioInput) -> None:
    trace_id, request_id = secrets.token_hex(16), new_id()
    trace = TraceContext(traceparent=f"00-{trace_id}-{secrets.token_hex(8)}-01")
    async with scenario.client() as client:
        events = client.generate(
            PROMPT, deadline_s=CALL_S, trace=trace, **greedy(4, request_id=request_id)
        )
        checked = CheckedStream(events)
        await checked.until_end()
    accepted = await checked.until_accepted()
    require(accepted.request_id == request_id, f"accepted as {accepted.request_id}")
    require(accepted.trace_id == trace_id, f"the trace id is {accepted.trace_id}")


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        stream_in_order,
        once_equals_stream,
        token_prompt,
        chat,
        utf8_across_chunks,
        large_prompt,
        metadata,
    )
}
