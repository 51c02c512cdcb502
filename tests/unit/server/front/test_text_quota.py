"""Prompts, and token ids to detokenise, are charged to their tenant's quota before the conversion.
The charge is refunded only if too much text of the tenant waits, or if the request is displaced
from the engine's queue.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from penstock.scheduler.events import Failed, Wait
from penstock.scheduler.quotas import TenantQuota
from penstock.scheduler.request import FailureReason
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, QuotaViolation, RequestError
from penstock.server.front.front import Front
from penstock.server.front.generation import (
    ChatInput,
    GenerationSpec,
    Output,
    PromptInput,
    TextInput,
    TokenInput,
)
from penstock.server.front.limits import Limits
from penstock.server.front.prompt_tokens import EncodedPrompt, Prompts, TextQuotas
from penstock.server.front.submission import CallTimes
from penstock.server.text.chat_template import ChatMessage
from penstock.server.text.errors import TooMuchText
from penstock.server.text.model_text import ModelText
from penstock.server.text.tokenizer import MAX_BYTES_PER_TENANT, MAX_INLINE_CHARS
from penstock.server.text.tokenizer_pool import in_one_step
from support.core import FakeClock
from support.fronts import INFO, rejected
from support.replay_harness import PROMPT, ReplayHarness, generation

WORDS = "the gentle rain "
LIMITS = Limits.from_config(FrontConfig(), INFO)


def quotas(clock: FakeClock, **limits: int) -> TextQuotas:
    return TextQuotas(lambda tenant: TenantQuota(**limits) if tenant else TenantQuota(), clock)


def charged(accounts: TextQuotas, num_tokens: int = 1) -> float | None:
    """Charge tenant `t`. Return None if the charge is accepted, or else the delay until a retry in
    seconds.
    """
    try:
        accounts.charge("t", num_tokens)
    except RequestError as error:
        return error.failure.retry_after_s
    return None


def test_a_limit_of_requests_fills_at_its_rate() -> None:
    clock = FakeClock()
    accounts = quotas(clock, max_requests_per_minute=2)
    assert [charged(accounts) for _ in range(3)] == [None, None, pytest.approx(30.0)]
    clock.now_s += 30.0
    assert [charged(accounts), charged(accounts)] == [None, pytest.approx(30.0)]
    accounts.refund("t", 0)
    assert charged(accounts) is None
    accounts.charge("", 10**9)  # without a limit


def test_tokens_are_settled_once_they_are_known_and_may_overdraw() -> None:
    clock = FakeClock()
    accounts = quotas(clock, max_tokens_per_minute=600)
    assert charged(accounts, 10) is None
    accounts.charge_more("t", 1190)
    assert charged(accounts, 1) == pytest.approx(60.1)
    clock.now_s += 61.0
    assert charged(accounts, 1) is None


def front_of(text: ModelText, **limits: int) -> Front:
    front = ReplayHarness(text).front
    front.prompts.quotas = quotas(FakeClock(), **limits)
    return front


async def encoded(prompts: Prompts, text: str, *, is_replay: bool = False) -> EncodedPrompt:
    return await prompts.encode(
        TextInput(text=text), "text_prompt.text", LIMITS, tenant="t", is_replay=is_replay
    )


async def rejection_of(
    front: Front, prompt: PromptInput, output: Output | None = None
) -> RequestError:
    made = GenerationSpec(
        prompt=prompt, prompt_path="text_prompt.text", tenant="t", output=output or Output()
    )
    with pytest.raises(RequestError) as caught:
        await front.open(made, CallTimes(arrival_s=front.clock()))
    return caught.value


async def test_prompts_that_are_rejected_count(text: ModelText) -> None:
    front = front_of(text, max_requests_per_minute=2)
    too_long = TextInput(text=WORDS * 2000)
    chat = ChatInput(messages=(ChatMessage(role="user", content=WORDS * 2000),))
    assert (await rejection_of(front, too_long)).reason is ErrorReason.PROMPT_TOO_LONG
    assert (await rejection_of(front, chat)).reason is ErrorReason.PROMPT_TOO_LONG
    rejected = await rejection_of(front, TextInput(text="x"))
    assert rejected.reason is ErrorReason.QUOTA_EXCEEDED
    assert rejected.failure.quota == QuotaViolation(
        subject="tenant:t", description="max_requests_per_minute is 2"
    )
    assert len(front.table) == 0


@pytest.mark.parametrize("wait", [None, Wait(slots_s=1.0)])
async def test_a_prompt_counts_unless_its_request_is_displaced(
    text: ModelText, wait: Wait | None
) -> None:
    """The failure of a displaced request has a `Wait`. That of a request rejected on arrival has
    none.
    """
    site = ReplayHarness(text)
    front = site.front
    front.prompts.quotas = quotas(
        FakeClock(), max_requests_per_minute=1, max_tokens_per_minute=len(PROMPT)
    )
    _, specs = await site.open(generation(2, tenant="t"))
    ends = [
        Failed(key=spec.key, at_s=site.now_s, reason=FailureReason.QUEUE_FULL, wait=wait)
        for spec in reversed(specs)
    ]
    site.port.emit(ends=ends)
    retry = generation(tenant="t", request_id="retry")
    if wait is None:
        with rejected(ErrorReason.QUOTA_EXCEEDED):
            await site.open(retry)
        return
    await site.open(retry)
    with rejected(ErrorReason.QUOTA_EXCEEDED):
        await site.open(generation(tenant="t", request_id="another"))


async def test_tokens_of_rejected_prompts_and_of_mere_questions_count(text: ModelText) -> None:
    prompts = front_of(text, max_tokens_per_minute=1000).prompts
    first = await encoded(prompts, WORDS * 400)
    assert len(first.ids) > 1000
    with rejected(ErrorReason.QUOTA_EXCEEDED):
        await encoded(prompts, "x")
    with pytest.raises(RequestError):
        await prompts.detokenize(TokenInput(ids=first.ids), tenant="t", skip_special_tokens=True)
    # Text of a request that was accepted before is not rejected in a replay.
    assert len((await encoded(prompts, "x", is_replay=True)).ids) > 0


async def test_all_text_of_a_conversation_counts_even_if_it_is_cut(text: ModelText) -> None:
    num_tokens = 100 * len(text.tokenizer.encode(WORDS * 40, add_special_tokens=False))
    assert num_tokens > text.tokenizer.min_num_tokens(len(WORDS) * 4000) + 400
    prompts = front_of(text, max_tokens_per_minute=num_tokens).prompts
    turns = tuple(ChatMessage(role="user", content=WORDS * 40) for _ in range(100))
    chat = ChatInput(messages=turns, window_tokens=200)
    found = await prompts.encode(chat, "chat_prompt.messages", LIMITS, tenant="t")
    assert len(found.ids) <= 200
    with rejected(ErrorReason.QUOTA_EXCEEDED):
        await encoded(prompts, "x")


async def test_all_tokens_of_a_short_text_count(text: ModelText) -> None:
    words = WORDS * 10
    num_tokens = len(text.tokenizer.encode(words))
    assert len(words) <= MAX_INLINE_CHARS
    assert num_tokens > text.tokenizer.min_num_tokens(len(words))
    prompts = front_of(text, max_tokens_per_minute=num_tokens).prompts
    await encoded(prompts, words)
    with rejected(ErrorReason.QUOTA_EXCEEDED):
        await encoded(prompts, "x")


async def test_detokenising_counts(text: ModelText) -> None:
    prompts = front_of(text, max_tokens_per_minute=1000).prompts
    ids = TokenInput(ids=(60,) * 900)
    assert await prompts.detokenize(ids, tenant="t", skip_special_tokens=True)
    with rejected(ErrorReason.QUOTA_EXCEEDED):
        await prompts.detokenize(ids, tenant="t", skip_special_tokens=True)


async def test_token_ids_count_before_they_are_decoded(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = front_of(text, max_tokens_per_minute=500)
    decoded: list[int] = []

    def decode(ids: list[int], **_: Any) -> str:
        decoded.append(len(ids))
        return ""

    monkeypatch.setattr(text.tokenizer, "decode", decode)
    prompt = TokenInput(ids=(60,) * 400)
    made = GenerationSpec(
        prompt=prompt, prompt_path="token_prompt.ids", tenant="t", output=Output(echo=True)
    )
    await front.open(made, CallTimes(arrival_s=front.clock()))
    rejected = await rejection_of(front, prompt, Output(echo=True))
    assert rejected.reason is ErrorReason.QUOTA_EXCEEDED
    assert decoded == [400]


async def test_an_echo_of_token_ids_waits_as_a_text_of_four_bytes_each_does(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = ReplayHarness(text)
    front = site.front
    front.prompts.quotas = quotas(FakeClock(), max_requests_per_minute=1)
    site.port.info = replace(INFO, max_seq_len=4096, num_blocks=1024)
    site.come_up()
    bounds: list[tuple[int, bool]] = []

    async def full(*_: object, num_bytes: int, is_bounded: bool, **__: object) -> object:
        bounds.append((num_bytes, is_bounded))
        raise TooMuchText(max_bytes=8, retry_after_s=2.5)

    monkeypatch.setattr(text.tokenizer.pool, "run", full)
    for _ in range(2):  # the first has cost nothing
        rejected = await rejection_of(front, TokenInput(ids=(60,) * 2000), Output(echo=True))
        assert rejected.failure.quota == QuotaViolation(
            subject="tenant:t", description="max_text_bytes_per_tenant is 8"
        )
    assert bounds == [(8000, True)] * 2


class HeldTokenizer:
    """A tokenizer whose encoding waits until it is released."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._loop = asyncio.get_running_loop()
        self.entered = asyncio.Event()
        self.proceed = threading.Event()

    def encode_batch_fast(self, *args: Any, **kwargs: Any) -> Any:
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.proceed.wait(60)
        return self._real.encode_batch_fast(*args, **kwargs)


async def test_a_cancelled_text_counts_with_the_tokens_that_were_made_of_it(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = WORDS * 400
    num_tokens = len(text.tokenizer.encode(words))
    assert num_tokens > text.tokenizer.min_num_tokens(len(words))
    prompts = front_of(text, max_tokens_per_minute=num_tokens).prompts
    settled = asyncio.Event()
    charge_more = prompts.quotas.charge_more

    def noted(tenant: str, num_more: int) -> None:
        charge_more(tenant, num_more)
        settled.set()

    monkeypatch.setattr(prompts.quotas, "charge_more", noted)
    controls: Any = text.tokenizer._controls
    held = HeldTokenizer(controls._tokenizer)
    monkeypatch.setattr(controls, "_tokenizer", held)
    encoding = asyncio.create_task(encoded(prompts, words))
    await held.entered.wait()
    encoding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await encoding
    assert not settled.is_set(), "its number is not known yet"
    pool, most = text.tokenizer.pool, MAX_BYTES_PER_TENANT
    with pytest.raises(TooMuchText):
        await pool.run(in_one_step(lambda: 1, most), tenant="t", num_bytes=most)
    held.proceed.set()
    await settled.wait()
    assert await pool.run(in_one_step(lambda: 1, most), tenant="t", num_bytes=most) == 1
    with rejected(ErrorReason.QUOTA_EXCEEDED):
        await encoded(prompts, "x")


async def test_a_text_that_is_cancelled_while_it_waits_counts_with_its_fewest_tokens(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = WORDS * 400
    least = text.tokenizer.min_num_tokens(len(words))
    prompts = front_of(text, max_tokens_per_minute=least).prompts
    monkeypatch.setattr(text.tokenizer.pool, "_num_threads", 0)
    encoding = asyncio.create_task(encoded(prompts, words))
    await asyncio.sleep(0)
    encoding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await encoding
    with rejected(ErrorReason.QUOTA_EXCEEDED):
        await encoded(prompts, "x")


async def test_too_much_waiting_text_is_rejected_and_costs_nothing(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = front_of(text, max_requests_per_minute=1)

    async def full(*_: object, **__: object) -> object:
        raise TooMuchText(max_bytes=8, retry_after_s=2.5)

    with monkeypatch.context() as patch:
        patch.setattr(text.tokenizer.pool, "run", full)
        rejected = await rejection_of(front, TextInput(text=WORDS * 100))
        with pytest.raises(RequestError):
            await front.prompts.detokenize(
                TokenInput(ids=(60,) * 2000), tenant="t", skip_special_tokens=True
            )
    assert rejected.reason is ErrorReason.QUOTA_EXCEEDED
    assert rejected.failure.retry_after_s == 2.5
    assert rejected.failure.quota == QuotaViolation(
        subject="tenant:t", description="max_text_bytes_per_tenant is 8"
    )
    too_long = await rejection_of(front, TextInput(text=WORDS * 2000))
    assert too_long.reason is ErrorReason.PROMPT_TOO_LONG
