"""A stop token is counted and reported, but its text is not delivered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from penstock.scheduler.request import FinishReason
from penstock.server.front.events import Finished, StreamEvent, TokensPiece
from penstock.server.front.generation import Output, Stopping
from penstock.server.text.model_text import ModelText
from support.replay_harness import A, B, C, D, ReplayHarness, end_of, generation, text_in


def stopping(*, min_tokens: int = 0, **options: object) -> Stopping:
    made = Stopping(max_tokens=20, min_tokens=min_tokens, stop_token_ids=(B,), ignore_eos=True)
    return structs.replace(made, **options)


async def play(site: ReplayHarness, tokens: list[int], **options: object) -> list[StreamEvent]:
    """Return the events of a request that samples `tokens`, the last of which is a stop token."""
    request, specs = await site.open(generation(**options))  # type: ignore[arg-type]
    for spec in specs:
        site.run(spec.key)
        for token in tokens:
            site.tokens((spec.key, token))
        site.port.finish(spec.key, FinishReason.STOP, stop_id=tokens[-1])
    return await end_of(request)


def records_in(events: list[StreamEvent]) -> list[int]:
    pieces = [event for event in events if isinstance(event, TokensPiece)]
    return [record.token_id for piece in pieces for record in piece.records]


@pytest.mark.parametrize("wants_records", [False, True])
@pytest.mark.parametrize("num_outputs", [1, 2])
async def test_the_text_of_a_stop_token_is_not_delivered(
    text: ModelText, num_outputs: int, wants_records: bool
) -> None:
    site = ReplayHarness(text)
    output = Output(return_token_ids=wants_records)
    events = await play(
        site, [A, C, B], num_outputs=num_outputs, stopping=stopping(), output=output
    )
    assert text_in(events) == num_outputs * text.tokenizer.decode([A, C])
    assert records_in(events) == (num_outputs * [A, C, B] if wants_records else [])
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert [end.num_completion_tokens for end in finished.outputs] == num_outputs * [3]
    assert [end.stop_token_id for end in finished.outputs] == num_outputs * [B]


async def test_text_held_for_a_stop_string_is_released_without_the_stop_token(
    text: ModelText,
) -> None:
    held, stop = (text.tokenizer.decode([token]) for token in (C, B))
    made = stopping(stop_strings=(held + stop,), include_stop_string=True)
    events = await play(ReplayHarness(text), [A, C, B], stopping=made)
    assert text_in(events) == text.tokenizer.decode([A, C])
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.outputs[0].stop_string is None


async def test_a_stop_token_before_min_tokens_is_text(text: ModelText) -> None:
    events = await play(ReplayHarness(text), [B, A, B], stopping=stopping(min_tokens=2))
    assert text_in(events) == text.tokenizer.decode([B, A])


async def test_the_models_own_end_has_no_text_whatever_its_kind(text: ModelText) -> None:
    ordinary = ModelText(replace(text.files, eos_ids=(D,)))
    assert ordinary.tokenizer.decode([D])
    try:
        ends = await play(ReplayHarness(ordinary), [A, D], stopping=Stopping(max_tokens=20))
        ignored = await play(ReplayHarness(ordinary), [D, B], stopping=stopping())
    finally:
        ordinary.close()
    assert text_in(ends) == text.tokenizer.decode([A])
    assert text_in(ignored) == text.tokenizer.decode([D])


async def test_a_stop_token_has_no_text_after_a_replay(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, [first] = await site.open(generation(stopping=stopping(min_tokens=1)))
    site.run(first.key)
    site.tokens((first.key, A))
    [again] = await site.replace_engine()
    site.run(again.key)
    site.tokens((again.key, C))
    site.tokens((again.key, B))
    site.port.finish(again.key, FinishReason.STOP, stop_id=B)
    assert text_in(await end_of(request)) == text.tokenizer.decode([A, C])
