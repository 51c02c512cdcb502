"""A plain token, which adds nothing but text to its stream, has the same results by the fast path
as by the general path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.scheduler.events import Admitted, Completed, Failed, Preempted, Queued
from penstock.scheduler.request import FailureReason, FinishReason
from penstock.server.front.config import FrontConfig
from penstock.server.front.events import StreamEvent, TokensPiece
from penstock.server.front.front import Front
from penstock.server.front.generation import (
    ChunkLimits,
    GenerationSpec,
    Output,
    Sampling,
    Stopping,
    TextInput,
)
from penstock.server.front.live_output import LiveOutput
from penstock.server.front.live_request import LiveRequest, LiveRequestOutput
from penstock.server.front.stream import TokenStream
from penstock.server.front.submission import CallTimes
from penstock.server.text.model_text import ModelText
from support.fronts import ScriptedPort

MAX_BACKLOG_TOKENS = 4
NUM_OUTPUTS = 2
TAKE, FAIL, CLOSE, ABORT = "take", "fail", "close", "abort"
SOME_IDS = (67, 68, 69, 70)


@dataclass(frozen=True)
class Update:
    """What the engine reports in one step. `kind`: an event or end of the output `index`, "" for
    none; `tokens`: (output index, token id) of each token.
    """

    kind: str
    index: int
    tokens: Sequence[tuple[int, int]] = ()


Script = list[Update | str | int]
"""Actions besides events: take all, take this many tokens, and other ends of a stream."""
PLAIN = Update("", 0, [(0, SOME_IDS[0])])
OPENING: Script = [Update("admitted", 0), PLAIN]

indexes = st.integers(0, NUM_OUTPUTS - 1)
# Most reports are tokens; other events are rare, as in a real engine.
tokens = st.lists(
    st.tuples(indexes, st.one_of(st.sampled_from(SOME_IDS), st.integers(0, 400))),
    min_size=1,
    max_size=3,
)
token_updates = st.builds(Update, st.just(""), st.just(0), tokens)
changes = st.builds(Update, st.sampled_from(("queued", "admitted", "preempted")), indexes)
ends = st.builds(Update, st.sampled_from(("finished", "failed")), indexes, tokens)
steps = st.one_of(token_updates, st.just(TAKE), st.integers(0, 3), changes)
scripts = st.builds(
    lambda first, last, after: [*OPENING, *first, *last, *after],
    st.lists(steps, min_size=4, max_size=20),
    st.lists(st.one_of(ends, st.sampled_from((FAIL, CLOSE, ABORT))), max_size=1),
    st.lists(steps, max_size=6),
)


def generation_of(
    num_outputs: int,
    stops: tuple[str, ...] = (),
    *,
    has_ids: bool = False,
    min_chunk_tokens: int = 1,
) -> GenerationSpec:
    return GenerationSpec(
        prompt=TextInput(text="hello"),
        prompt_path="text_prompt.text",
        request_id="r",
        sampling=Sampling(num_outputs=num_outputs, seed=1),
        stopping=Stopping(max_tokens=200, stop_strings=stops),
        output=Output(
            return_token_ids=has_ids,
            chunks=ChunkLimits(min_tokens=min_chunk_tokens, max_delay_s=60.0),
        ),
    )


nums_outputs, chunk_tokens = st.integers(1, NUM_OUTPUTS), st.sampled_from((1, 1, 3))
plain = st.builds(generation_of, nums_outputs, min_chunk_tokens=chunk_tokens)
others = st.builds(
    generation_of,
    nums_outputs,
    st.just(("ab",)),
    has_ids=st.booleans(),
    min_chunk_tokens=chunk_tokens,
)


def take(stream: TokenStream, max_tokens: int | None, *, is_short: bool) -> list[StreamEvent]:
    if is_short and max_tokens != 0:
        text = stream.take_text()
        if text is not None:
            return [TokensPiece(0, text, 1, ())]
    return stream.take_due(max_tokens)


def emit(port: ScriptedPort, request: LiveRequest, updates: Update, at_s: float) -> None:
    """Report the updates as one step of an engine, also in combinations that no real engine
    reports.
    """
    keys = [output.key for output in request.outputs]
    key = keys[updates.index % len(keys)]
    changes: dict[str, Queued | Admitted | Preempted] = {
        "queued": Queued(key=key, at_s=at_s, num_ahead=1, estimated_queue_s=None),
        "admitted": Admitted(key=key, at_s=at_s, num_cached_tokens=0, num_preemptions=0),
        "preempted": Preempted(key=key, at_s=at_s),
    }
    ends: dict[str, Completed | Failed] = {
        "finished": Completed(key=key, at_s=at_s, reason=FinishReason.LENGTH, stop_id=-1),
        "failed": Failed(key=key, at_s=at_s, reason=FailureReason.EXECUTOR_REQUEST_FAILED),
    }
    port.emit(
        tokens=[(keys[index % len(keys)], token_id) for index, token_id in updates.tokens],
        changes=[changes[updates.kind]] if updates.kind in changes else [],
        ends=[ends[updates.kind]] if updates.kind in ends else [],
        at_s=at_s,
    )


async def play(
    text: ModelText, generation: GenerationSpec, script: Script, *, is_short: bool
) -> tuple[list[object], int]:
    """Return everything that can be observed while the script runs, and the number of updates after
    which an output had a plain token. `is_short`: take plain tokens by the fast path.
    """
    seen: list[object] = []
    now_s = 0.0
    port = ScriptedPort()
    config = FrontConfig(acceptance_delay_s=60.0, max_backlog_tokens=MAX_BACKLOG_TOKENS)
    front = Front(text, config, port=port, clock=lambda: now_s)
    port.listener = front
    port.come_up()
    request = await front.open(generation, CallTimes(arrival_s=0.0))
    stream = request.stream
    is_woken = False
    num_plain = 0

    def on_ready() -> None:
        nonlocal is_woken
        is_woken = True

    stream.attach(on_ready)
    for step in script:
        now_s += 1.0
        is_woken = False
        if step == CLOSE:
            front.release(request)
        elif step == FAIL:
            front.on_lost()
        elif step == ABORT:
            stream.wait_for_reader(-1000.0)
            front.disconnect_stalled()
        elif isinstance(step, Update):
            emit(port, request, step, now_s - 0.5)
            num_plain += any(output.is_plain for output in request.outputs)
        else:
            limit = step if isinstance(step, int) else None
            seen.append(take(stream, limit, is_short=is_short))
        seen.append((is_woken, stream.num_backlog_tokens, stream.is_drained, stream.is_aborted))
        seen.append((request.state, request.live_keys, stream.failure))
    seen.append(take(stream, None, is_short=is_short))
    front.release(request)
    seen.append((port.cancelled, front.counters))
    return seen, num_plain


def check_both_ways(text: ModelText, generation: GenerationSpec, script: Script) -> int:
    short, num_plain = asyncio.run(play(text, generation, script, is_short=True))
    with pytest.MonkeyPatch.context() as patch:
        never = property(lambda _: False, lambda _, value: None)
        patch.setattr(LiveOutput, "is_plain", never)
        general, num_plain_in_general = asyncio.run(play(text, generation, script, is_short=False))
    assert num_plain_in_general == 0
    assert short == general
    return num_plain


@given(plain, scripts)
@example(generation_of(2), [*OPENING, Update("admitted", 1), Update("finished", 0), PLAIN])
@example(generation_of(1), [*OPENING, TAKE, PLAIN, Update("finished", 0)])
@example(generation_of(1), [*OPENING, TAKE, PLAIN, ABORT])
@example(generation_of(1), [*OPENING, TAKE, PLAIN, Update("preempted", 0), 0])
def test_both_ways_return_the_same(
    text: ModelText, generation: GenerationSpec, script: Script
) -> None:
    assert check_both_ways(text, generation, script) > 0


@given(others, scripts)
def test_tokens_with_more_than_text_never_use_the_fast_path(
    text: ModelText, generation: GenerationSpec, script: Script
) -> None:
    assert check_both_ways(text, generation, script) == 0


def is_plain(output: LiveRequestOutput) -> bool:
    return output.is_plain


async def test_a_plain_token_uses_the_fast_path(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = GenerationSpec(prompt=TextInput(text="hello"), prompt_path="text_prompt.text")
    port = ScriptedPort()
    front = Front(text, FrontConfig(acceptance_delay_s=60.0), port=port)
    port.listener = front
    port.come_up()
    request = await front.open(generation, CallTimes(arrival_s=front.clock()))
    (output,) = request.outputs
    port.admit(output.key)
    port.send(output.key, SOME_IDS[:1])
    assert is_plain(output)
    await request.stream.take()
    with monkeypatch.context() as patch:
        patch.delattr(LiveRequest, "on_token")
        port.send(output.key, SOME_IDS[:1])
    assert request.stream.take_text()
    assert front.counters.num_internal_errors == 0
    port.emit(changes=[Preempted(key=output.key, at_s=front.clock())])
    assert not is_plain(output)
    front.release(request)
