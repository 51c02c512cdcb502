"""Where a long conversation is cut. The cut does not move with every new message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.server.text.chat_template import ChatMessage
from penstock.server.text.chat_window import TemplateCost, first_kept, fit_window, measure_template
from penstock.server.text.errors import ChatTemplateError, WindowTooSmall
from penstock.server.text.model_files import ModelFiles
from penstock.server.text.tokenizer import Tokenizer
from penstock.server.text.tokenizer_pool import Steps, in_one_step, run_at_once
from support.tiny_tokenizers import encode_chat, write_model_folder

T = TypeVar("T")
BASE, OVERHEAD = 3, 4
COST = TemplateCost(base_tokens=BASE, message_tokens=OVERHEAD)
MAX_LEAD, MAX_LENGTH, MAX_SURPLUS = 20, 30, 3
# The longest lead and the longest last turn, which stay whatever is cut, fit into this.
LEAST_WINDOW = (
    BASE + (len("system") + MAX_LEAD) + (len("u") + MAX_LENGTH) + 2 * (OVERHEAD + MAX_SURPLUS)
)


def num_tokens(text: str) -> int:
    return len(text)


def turns(*lengths: int, lead: int | None = None) -> list[ChatMessage]:
    """Return messages of user and assistant in turn, whose contents have these lengths in tokens.
    If `lead` is given, a system message of `lead` tokens comes first. A role has one token per
    letter.
    """
    reported = [
        ChatMessage(role="ua"[index % 2], content="x" * length)
        for index, length in enumerate(lengths)
    ]
    return reported if lead is None else [ChatMessage(role="system", content="s" * lead), *reported]


class Encoder:
    """Encodes a chat to a list with one item per token. A chat has BASE tokens; each message has
    one more per letter of its role and content, and OVERHEAD + `surplus` more. Counts the messages
    that it encodes.
    """

    def __init__(self, surplus: int = 0) -> None:
        self.surplus = surplus
        self.num_messages_encoded = 0

    def __call__(self, messages: Sequence[ChatMessage]) -> list[ChatMessage | None]:
        self.num_messages_encoded += len(messages)
        size = BASE + sum(
            OVERHEAD + self.surplus + len(message.role) + len(message.content)
            for message in messages
        )
        return [*messages, *[None] * (size - len(messages))]


def kept(
    messages: Sequence[ChatMessage], window_tokens: int, encode: Encoder | None = None
) -> tuple[list[ChatMessage], int]:
    encode = encode or Encoder()
    encoded, num_dropped = run_at_once(
        fit_window(
            messages,
            window_tokens,
            encode=lambda turns: in_one_step(lambda: encode(turns), 1),
            num_tokens=lambda text: in_one_step(lambda: num_tokens(text), 1),
            cost=COST,
        )
    )
    assert len(encoded) <= window_tokens
    return [message for message in encoded if message is not None], num_dropped


def test_a_conversation_that_fits_is_not_cut() -> None:
    conversation = turns(5, 5, 5, lead=5)
    assert kept(conversation, BASE + 15 + 3 * 10) == (conversation, 0)
    assert kept(conversation, BASE + 15 + 3 * 10 - 1)[1] > 0


def test_the_system_message_and_the_last_turn_are_kept_and_a_user_message_follows() -> None:
    conversation = turns(5, 5, 5, 5, 5, lead=5)
    left, num_dropped = kept(conversation, 50)
    assert left == [conversation[0], *conversation[1 + num_dropped :]]
    assert left[1].role == "u"
    assert left[-1] is conversation[-1]


def test_a_window_that_is_too_small_is_rejected_with_what_is_needed() -> None:
    conversation = turns(5, 5, 5, lead=5)
    assert kept(conversation, BASE + 15 + 10)[1] == 2
    with pytest.raises(WindowTooSmall, match=f"at least {BASE + 15 + 10} tokens"):
        kept(conversation, BASE + 15 + 9)


def test_a_conversation_of_only_a_system_message_is_accepted_or_rejected() -> None:
    lead = turns(lead=5)
    assert kept(lead, BASE + 15) == (lead, 0)
    with pytest.raises(WindowTooSmall):
        kept(lead, BASE + 14)


@given(
    lengths=st.lists(st.integers(0, MAX_LENGTH), min_size=1, max_size=60),
    lead=st.none() | st.integers(0, MAX_LEAD),
    window=st.integers(LEAST_WINDOW, 300),
    surplus=st.integers(0, MAX_SURPLUS),
)
@example(lengths=[MAX_LENGTH], lead=MAX_LEAD, window=LEAST_WINDOW, surplus=MAX_SURPLUS)
def test_a_growing_conversation_is_cut_in_strides(
    lengths: list[int], lead: int | None, window: int, surplus: int
) -> None:
    conversation = turns(*lengths, lead=lead)
    num_leading = lead is not None
    cuts: list[int] = []
    for end in range(num_leading + 1, len(conversation) + 1, 2):
        left, num_dropped = kept(conversation[:end], window, Encoder(surplus))
        assert left == [*conversation[:num_leading], *conversation[num_leading + num_dropped : end]]
        cuts.append(num_dropped)
    if not surplus:
        assert cuts == sorted(cuts)
    # A cut leaves about half of the window, and only that much text moves it again.
    num_moves = len(set(cuts)) - 1
    total = sum(len(message.content) + 1 + OVERHEAD + surplus for message in conversation)
    room = window - BASE - (0 if lead is None else lead + 6 + OVERHEAD + surplus)
    longest = 2 * (MAX_LENGTH + 1 + OVERHEAD + surplus)
    if room > 2 * longest:
        assert num_moves <= (2 if surplus else 1) * (1 + total / (room / 2 - longest / 2))


@given(costs=st.lists(st.integers(1, 20), min_size=1, max_size=40), room=st.integers(1, 100))
def test_a_cut_follows_from_the_conversation_so_far(costs: list[int], room: int) -> None:
    sums = [0, *accumulate(costs)]
    may_start = [index % 2 == 0 for index in range(len(costs))]
    starts = [
        first_kept(sums[: end + 1], may_start[:end], room) for end in range(1, len(costs) + 1)
    ]
    for end, start in enumerate(starts, start=1):
        assert may_start[start]
        is_last = start == max(i for i in range(end) if may_start[i])
        assert sums[end] - sums[start] <= room or is_last or end - start <= 2
    for before, after, end in zip(starts, starts[1:], range(2, len(costs) + 1), strict=False):
        assert after == before or sums[end] - sums[before] > room


def first_kept_naively(sums: Sequence[int], may_start: Sequence[bool], room: int) -> int:
    """Return what `first_kept` returns, searched from the beginning at every overflow."""
    start = 0
    for end in range(1, len(sums)):
        if sums[end] - sums[start] <= room:
            continue
        possible = [index for index in range(start + 1, end) if may_start[index]]
        fitting = (index for index in possible if sums[end] - sums[index] <= room * 0.5)
        start = next(fitting, possible[-1] if possible else start)
    return start


@given(
    turns=st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=60),
    room=st.integers(-5, 120),
)
def test_a_cut_equals_that_of_a_full_search(turns: list[tuple[int, bool]], room: int) -> None:
    sums = [0, *accumulate(cost for cost, _ in turns)]
    may_start = [may for _, may in turns]
    assert first_kept(sums, may_start, room) == first_kept_naively(sums, may_start, room)


class CountingReads(list[int]):
    num_reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("num_starts", [0, 1, 300, 3000])
def test_a_cut_takes_time_in_proportion_to_the_conversation(num_starts: int) -> None:
    num = 3000
    sums = CountingReads(range(0, 10 * num + 1, 10))
    first_kept(sums, [index >= num - num_starts for index in range(num)], 100)
    assert sums.num_reads <= 4 * num


def test_long_conversations_are_encoded_about_once() -> None:
    encode = Encoder()
    conversation = turns(*[7] * 511)
    kept(conversation, 200, encode)
    assert encode.num_messages_encoded < 20
    wrong = Encoder(surplus=2)
    kept(conversation, 200, wrong)
    assert wrong.num_messages_encoded < 60


def test_the_templates_share_is_measured() -> None:
    messages = [ChatMessage(role="user", content="a"), ChatMessage(role="assistant", content="b")]
    cost = measure_template(Encoder(), num_tokens)
    assert cost == COST
    assert len(Encoder()(messages)) == BASE + 2 * OVERHEAD + len("usera" + "assistantb")

    def rejecting(messages: Sequence[ChatMessage]) -> list[None]:
        raise ChatTemplateError("no")

    assert measure_template(rejecting, num_tokens).message_tokens > 0


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(ModelFiles.load(write_model_folder(tmp_path)))


def test_the_sum_is_exact_for_a_usual_template(tokenizer: Tokenizer) -> None:
    conversation = [
        ChatMessage(role=("user", "assistant")[index % 2], content="the gentle rain " * (index % 5))
        for index in range(21)
    ]
    whole = encode_chat(tokenizer, conversation)
    fitting = asyncio.run(tokenizer.encode_chat_async(conversation, window_tokens=len(whole)))
    assert fitting.num_dropped_messages == 0
    assert fitting.ids.tolist() == whole.ids.tolist()
    smaller = asyncio.run(tokenizer.encode_chat_async(conversation, window_tokens=len(whole) - 1))
    assert 0 < smaller.num_dropped_messages < 20
    assert smaller.text == encode_chat(tokenizer, conversation[smaller.num_dropped_messages :]).text
    with pytest.raises(WindowTooSmall):
        asyncio.run(tokenizer.encode_chat_async(conversation, window_tokens=3))
    tokenizer.close()


async def test_a_long_conversation_is_cut_in_steps(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = tokenizer.pool.run

    def noted(steps: Steps[T]) -> Steps[T]:
        while True:
            try:
                sizes.append(next(steps))
            except StopIteration as end:
                return cast("T", end.value)
            yield sizes[-1]

    def noting(steps: Steps[T], **settings: Any) -> Awaitable[T]:
        return run(noted(steps), **settings)

    monkeypatch.setattr(tokenizer.pool, "run", noting)
    long, short = "the gentle rain " * 600, "rain " * 10
    conversation = [
        ChatMessage(role=("user", "assistant")[index % 2], content=long if index < 40 else short)
        for index in range(400)
    ]
    found = await tokenizer.encode_chat_async(conversation, window_tokens=2000)
    assert found.num_dropped_messages >= 40
    # No call encodes the whole conversation, nor a single short message.
    assert 40 < len(sizes) < 60
    assert max(sizes) < 3 * len(long)
    tokenizer.close()


@pytest.mark.parametrize("field", ["role", "name", "tool_call_id"])
async def test_all_text_of_a_message_counts_when_a_thread_is_chosen(
    field: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long text of any field is encoded in a thread, because it would block the event loop."""
    sizes: list[int] = []

    async def noting(steps: Steps[T], *, num_bytes: int, **_: Any) -> T:
        sizes.append(num_bytes)
        raise WindowTooSmall("noted")

    monkeypatch.setattr(tokenizer.pool, "run", noting)
    fields: dict[str, Any] = {"role": "user", "content": "", field: "r" * 64}
    conversation = [ChatMessage(**fields) for _ in range(512)]
    with pytest.raises(WindowTooSmall):
        await tokenizer.encode_chat_async(conversation, window_tokens=64)
    assert sizes[0] >= 512 * 64
    tokenizer.close()
