"""Requests whose engine was lost: what the next engine gets, and what clients receive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.request import (
    NO_TIME,
    FinishReason,
    SamplingParams,
)
from penstock.scheduler.state import RequestState
from penstock.server.front.accounts import Outcome
from penstock.server.front.admission_estimate import AdmissionEstimate
from penstock.server.front.errors import RequestError
from penstock.server.front.events import (
    Accepted,
    Finished,
    Progress,
    PromptPiece,
)
from penstock.server.front.generation import (
    Output,
    Sampling,
    Stopping,
    TextInput,
    Urgency,
)
from penstock.server.front.replay import MAX_UNSENT_BYTES
from penstock.server.front.submission import CallTimes
from penstock.server.ipc.ports import EngineUnavailable
from penstock.server.observe.request_record import SegmentKind
from penstock.server.text.model_text import ModelText
from support.fronts import INFO, admitted, flat_logprobs
from support.replay_harness import (
    PROMPT,
    A,
    B,
    C,
    D,
    ReplayHarness,
    constrained,
    end_of,
    generation,
    text_in,
)


async def test_the_next_engine_continues_after_what_came(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, [first] = await site.open(generation())
    site.run(first.key)
    site.tokens((first.key, A))
    site.tokens((first.key, B))
    [again] = await site.replace_engine()
    assert again.prompt_ids.tolist() == [*PROMPT, A, B]
    assert (again.num_replayed, again.num_replays) == (2, 1)
    assert (again.key, again.request_id) == (first.key, first.request_id)
    assert again.num_original_prompt_tokens == len(PROMPT)
    assert again.max_total_tokens == first.max_total_tokens
    assert again.sampling == first.sampling
    site.run(again.key)
    site.tokens((again.key, C))
    site.port.finish(again.key)
    events = await end_of(request)
    assert text_in(events) == text.tokenizer.decode([A, B, C])
    states = [event.state for event in events if isinstance(event, Progress)]
    assert states == [
        RequestState.PROCESSING,
        RequestState.PENDING,
        RequestState.PROCESSING,
    ]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.outputs[0].num_completion_tokens == 3
    assert finished.usage.num_prompt_tokens == len(PROMPT)
    assert request.num_replays == 1


class CountedEstimate(AdmissionEstimate):
    """Counts the requests that were reported as sent."""

    num_at_engine = 0

    def note_sent(self, num_requests: int, num_tokens: int) -> None:
        self.num_at_engine += num_requests
        super().note_sent(num_requests, num_tokens)


@pytest.mark.parametrize("max_replays", [0, 3])
async def test_the_estimate_counts_requests_sent_to_engines(
    text: ModelText, max_replays: int
) -> None:
    site = ReplayHarness(text, max_replays=max_replays)
    estimate = site.front.admission = CountedEstimate()

    request, _ = await site.open(generation(num_outputs=2))
    assert estimate.num_at_engine == 2
    site.front.release(request)
    assert estimate.num_at_engine == 0

    def break_off(specs: object, kept: object = None) -> None:
        del specs, kept
        raise EngineUnavailable

    site.port.submit = break_off  # type: ignore[method-assign]  # it goes at that very moment
    if max_replays:
        suspended = await site.front.open(generation(), CallTimes(arrival_s=site.now_s))
        site.front.release(suspended)
    else:
        with pytest.raises(RequestError):
            await site.front.open(generation(), CallTimes(arrival_s=site.now_s))
    assert estimate.num_at_engine == 0, "it was given to none, and none was taken back"


async def test_the_estimate_counts_a_replay_once(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, _ = await site.open(generation())
    estimate = site.front.admission = CountedEstimate()

    site.port.go_down()
    site.front.release_all(())
    site.come_up()
    await site.port.next_submission()
    assert estimate.num_at_engine == 1
    site.front.release(request)
    assert estimate.num_at_engine == 0


async def test_hashes_continue_where_the_prompt_ended(text: ModelText) -> None:
    site = ReplayHarness(text)
    _, [first] = await site.open(generation())
    site.run(first.key)
    for _ in range(12):
        site.tokens((first.key, A))
    [again] = await site.replace_engine()
    root = chain_root(first.hash_salt)
    assert again.hash_salt == first.hash_salt
    assert again.block_hashes[: len(first.block_hashes)] == first.block_hashes
    assert again.block_hashes == hash_blocks(again.prompt_ids, INFO.block_size, root)
    assert len(again.block_hashes) == 52 // INFO.block_size
    # And for an engine with other blocks.
    site.port.info = replace(INFO, block_size=8)
    [third] = await site.replace_engine()
    assert third.block_hashes == hash_blocks(third.prompt_ids, 8, root)
    assert third.num_replays == 2


async def test_without_earlier_output_the_prompt_is_sent_unchanged(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, [first] = await site.open(generation())
    [again] = await site.replace_engine()
    assert again.prompt_ids.tolist() == list(PROMPT)
    assert (again.num_replayed, again.num_replays) == (0, 1)
    # Its client gets the accepted event at once: it will not be rejected any more.
    assert isinstance((await request.stream.take())[0], Accepted)
    assert first.key == again.key


async def test_an_output_that_has_ended_does_not_run_again(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, specs = await site.open(generation(3))
    keys = [spec.key for spec in specs]
    site.run(*keys)
    site.tokens((keys[0], A), (keys[1], B), (keys[2], C))
    site.port.finish(keys[0])
    again = await site.replace_engine()
    assert [spec.key for spec in again] == keys[1:]
    assert [spec.output_index for spec in again] == [1, 2]
    assert [spec.leader_key for spec in again] == [0, keys[1]]
    assert [spec.prompt_ids.tolist()[-1] for spec in again] == [B, C]
    site.tokens((keys[1], D))
    site.port.finish(keys[1])
    [last] = await site.replace_engine()
    assert (last.key, last.leader_key, last.num_replays) == (keys[2], 0, 2)
    site.port.finish(keys[2])
    finished = (await end_of(request))[-1]
    assert isinstance(finished, Finished)
    assert [end.num_completion_tokens for end in finished.outputs] == [1, 2, 1]


async def test_a_stop_string_may_lie_across_a_death(text: ModelText) -> None:
    site = ReplayHarness(text)
    stopping = Stopping(max_tokens=20, ignore_eos=True, stop_strings=("dogma",))
    made = generation(prompt=TextInput(text="x"), prompt_path="text_prompt.text", stopping=stopping)
    request, [first] = await site.open(made)
    ids = text.tokenizer.encode("hot dogma!", add_special_tokens=False).tolist()
    cut = len(text.tokenizer.encode("hot dog", add_special_tokens=False))
    site.run(first.key)
    for token_id in ids[:cut]:
        site.tokens((first.key, token_id))
    [again] = await site.replace_engine()
    assert again.num_replayed == cut
    for token_id in ids[cut:]:
        site.tokens((again.key, token_id))
    events = await end_of(request)
    assert text_in(events) == "hot "
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.outputs[0].stop_string == "dogma"


async def test_a_character_may_lie_across_a_death(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, [first] = await site.open(generation())
    ids = text.tokenizer.encode("€", add_special_tokens=False).tolist()
    assert len(ids) > 1, "the tokenizer is one of bytes"
    site.run(first.key)
    site.tokens((first.key, ids[0]))
    [again] = await site.replace_engine()
    for token_id in ids[1:]:
        site.tokens((again.key, token_id))
    site.port.finish(again.key)
    assert text_in(await end_of(request)) == "€"


async def test_prompt_logprobs_and_echo_are_returned_once(text: ModelText) -> None:
    site = ReplayHarness(text)
    output = Output(num_prompt_logprobs=1, echo=True, return_token_ids=True)
    sampling = Sampling(params=SamplingParams(num_prompt_logprobs=1), seed=7)
    request, [first] = await site.open(generation(output=output, sampling=sampling))
    num_rows = len(PROMPT) - 1
    site.run(first.key)
    site.port.emit(prompt_logprobs=[(first.key, 1, flat_logprobs(10))])
    [again] = await site.replace_engine()
    assert again.sampling.num_prompt_logprobs == 1, "not all was told"
    site.port.emit(prompt_logprobs=[(first.key, 1, flat_logprobs(num_rows))])
    [third] = await site.replace_engine()
    assert third.sampling.num_prompt_logprobs == -1
    site.port.finish(third.key)
    pieces = [event for event in await end_of(request) if isinstance(event, PromptPiece)]
    assert sum(len(piece.records) for piece in pieces) == len(PROMPT)
    assert [piece.text for piece in pieces if piece.text] == [text.tokenizer.decode(list(PROMPT))]


async def test_the_deadline_of_the_first_token_is_met_once(text: ModelText) -> None:
    site = ReplayHarness(text)
    made = generation(urgency=Urgency(ttft_deadline_s=5.0, total_deadline_s=9.0))
    _, [first] = await site.open(made)
    [again] = await site.replace_engine()
    assert again.ttft_deadline_s == first.ttft_deadline_s == site.now_s + 5.0
    site.run(again.key)
    site.tokens((again.key, A))
    [third] = await site.replace_engine()
    assert third.ttft_deadline_s == NO_TIME
    assert (third.deadline_s, third.arrival_s) == (first.deadline_s, first.arrival_s)


async def test_a_prompt_in_preparation_waits_for_the_next_engine(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = ReplayHarness(text)
    entered, proceed = asyncio.Event(), asyncio.Event()

    async def slowly(_: str, **_options: object) -> object:
        entered.set()
        await proceed.wait()
        return np.array(PROMPT, dtype=np.int32)

    monkeypatch.setattr(text.tokenizer, "encode_async", slowly)
    made = generation(prompt=TextInput(text="x"), prompt_path="text_prompt.text")
    opening = asyncio.ensure_future(site.front.open(made, CallTimes(arrival_s=site.now_s)))
    await entered.wait()
    site.port.go_down()
    proceed.set()
    request = await opening
    assert len(site.front.replays) == 1
    # Another one, with other blocks: hashed again.
    site.port.info = replace(INFO, block_size=8)
    site.come_up()
    [spec] = await site.port.next_submission()
    assert spec.block_hashes == hash_blocks(spec.prompt_ids, 8, chain_root(spec.hash_salt))
    site.port.finish(spec.key)
    assert isinstance((await end_of(request))[-1], Finished)


async def test_an_engine_that_was_never_gone_gets_new_keys(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, [first] = await site.open(generation())
    site.run(first.key)
    site.tokens((first.key, A))
    site.port.go_down()
    site.port.come_up(site.epoch)
    [again] = await site.port.next_submission()
    assert again.key != first.key
    # Later events of the earlier key concern no client.
    site.port.finish(first.key, FinishReason.CANCELLED)
    site.tokens((again.key, B))
    site.port.finish(again.key)
    assert text_in(await end_of(request)) == text.tokenizer.decode([A, B])
    assert request.specs[0].key == again.key
    assert site.front.counters.num_late_events == 1


async def test_an_engine_that_accepts_no_more_requests_gets_none(text: ModelText) -> None:
    site = ReplayHarness(text)
    for number in range(3):
        await site.open(generation(request_id=f"r-{number}"))
    site.port.go_down()
    site.port.num_unsent_bytes = MAX_UNSENT_BYTES + 1
    site.come_up()
    assert len(site.front.replays) == 3
    site.port.num_unsent_bytes = 0
    names = [(await site.port.next_submission())[0].request_id for _ in range(3)]
    assert [name[-1] for name in names] == ["0", "1", "2"]
    assert len(site.front.replays) == 0


async def test_a_constraint_is_generated_again_and_delivered_from_where_it_was(
    text: ModelText,
) -> None:
    site = ReplayHarness(text)
    request, again = await constrained(site)
    for token_id in (A, B, C):
        site.tokens((again.key, token_id))
    site.port.finish(again.key)
    events = await end_of(request)
    assert text_in(events) == text.tokenizer.decode([A, B, C])
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.outputs[0].num_completion_tokens == 3


async def test_a_death_while_it_is_generated_again(text: ModelText) -> None:
    site = ReplayHarness(text)
    request, again = await constrained(site)
    site.tokens((again.key, A))
    [third] = await site.replace_engine()
    assert third.prompt_ids.tolist() == list(PROMPT)
    for token_id in (A, B, D):
        site.tokens((third.key, token_id))
    site.port.finish(third.key)
    assert text_in(await end_of(request)) == text.tokenizer.decode([A, B, D])


async def test_the_longest_prompt_of_an_engine_bounds_what_continues(text: ModelText) -> None:
    site = ReplayHarness(text)
    site.port.info = replace(INFO, max_prompt_tokens=len(PROMPT) + 1)
    site.port.go_down()
    site.come_up()
    request, [first] = await site.open(generation())
    site.run(first.key)
    site.tokens((first.key, A))
    [again] = await site.replace_engine()
    assert again.num_replayed == 1
    site.tokens((first.key, B))
    [third] = await site.replace_engine()
    assert third.num_replayed == 0, "no such prompt is taken: from the beginning"
    for token_id in (A, B, C):
        site.tokens((third.key, token_id))
    site.port.finish(third.key)
    assert text_in(await end_of(request)) == text.tokenizer.decode([A, B, C])


async def test_the_record_contains_the_lost_engine(text: ModelText) -> None:
    site = ReplayHarness(text)
    account = site.front.accounts.open("m", arrival_s=site.now_s)
    request = await site.front.open(generation(), CallTimes(arrival_s=site.now_s), account)
    [first] = await site.port.next_submission()
    kinds = SegmentKind
    acts: list[tuple[float, Callable[[], None]]] = [
        (1.0, lambda: site.port.emit(changes=[replace(admitted(first.key), at_s=1001.0)])),
        (1.0, lambda: site.tokens((first.key, A))),
        (1.0, lambda: site.tokens((first.key, B))),
        (1.0, site.port.go_down),
        (2.0, site.come_up),
        (1.0, lambda: site.port.emit(changes=[replace(admitted(first.key), at_s=1007.0)])),
        (1.0, lambda: site.tokens((first.key, C))),
    ]
    for step_s, act in acts:
        site.now_s += step_s
        act()
    site.now_s += 1.0
    site.front.release(request)
    account.set_outcome(Outcome(code=0), site.now_s)
    record = account.record(sequence=0, front_id=1, has_content=False)
    assert record.num_replays == 1
    assert record.num_cached_tokens == 0
    reported = [(one.kind, one.start_s - 1000.0, one.is_engine_lost) for one in record.segments]
    assert reported == [
        (kinds.QUEUE, 0.0, False),
        (kinds.PREFILL, 1.0, False),
        (kinds.DECODE, 2.0, False),
        (kinds.QUEUE, 4.0, True),
        (kinds.QUEUE, 6.0, False),
        (kinds.PREFILL, 7.0, False),
        (kinds.DECODE, 8.0, False),
    ]
    assert [one.num_tokens for one in record.segments if one.kind is kinds.DECODE] == [2, 1]
    ends = [one.end_s for one in record.segments]
    assert [one.start_s for one in record.segments[1:]] == ends[:-1], "they tile"
