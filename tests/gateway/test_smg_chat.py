"""An OpenAI client through the real gateway: which fields are passed on, and the responses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from gateway.smg import Gateway, gateway, openai, openai_client
from penstock.client import ChatMessage, Client, OperationsClient, TextPrompt
from support.observation import model_of, observed, until_stats
from support.otlp_receiver import Receiver, grpc_receiver
from support.service import Service, simulated
from support.timeout import TEST_TIMEOUT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES = [{"role": "user", "content": "What is a penstock?"}]
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass
class Harness:
    """Two workers, the gateway in front of them, and the collector of all their traces."""

    workers: list[Service]
    operations: list[OperationsClient]
    gateway: Gateway
    openai: Any
    receiver: Receiver


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[Harness]:
    async with contextlib.AsyncExitStack() as stack:
        receiver = stack.enter_context(grpc_receiver())
        workers, operations = [], []
        for _ in range(2):
            service, client = await stack.enter_async_context(
                observed(
                    *simulated(),
                    "--gateway",
                    "smg",
                    "--fronts",
                    "1",
                    "--otlp-endpoint",
                    receiver.endpoint,
                )
            )
            workers.append(service)
            operations.append(client)
        collector = receiver.endpoint.removeprefix("http://")
        made = await stack.enter_async_context(
            gateway(
                *(worker.address for worker in workers),
                arguments=("--enable-trace", "--otlp-traces-endpoint", collector),
            )
        )
        client = await stack.enter_async_context(openai_client(made))
        yield Harness(workers, operations, made, client, receiver)


async def read(stream: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """Return the texts and finish reasons of a stream by choice index, and the usage."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (delta or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


async def test_chat_streams_the_text_of_the_worker(harness: Harness) -> None:
    async with Client(harness.workers[0].address) as direct:
        messages = [ChatMessage(role="user", content="What is a penstock?")]
        wanted = await direct.generate_once(messages, max_tokens=24, temperature=0.0)
    stream = await harness.openai.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=24,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )

    texts, reasons, usage = await read(stream)

    assert texts == {0: wanted.text}
    assert reasons == {0: "length"}
    assert usage.completion_tokens == 24
    assert usage.prompt_tokens == wanted.finished.usage.num_prompt_tokens


async def test_completions_equal_the_workers_own_and_pass_seeds(harness: Harness) -> None:
    """Seeds are passed on, and the gateway adds no begin-of-sequence token to a text prompt."""
    prompt = TextPrompt(text="The gate opens", add_special_tokens=False)
    async with Client(harness.workers[0].address) as direct:
        wanted = await direct.generate_once(prompt, max_tokens=16, seed=7)
    answer = await harness.openai.completions.create(
        model="demo", prompt="The gate opens", max_tokens=16, seed=7
    )

    assert answer.choices[0].text == wanted.text
    assert answer.usage.prompt_tokens == wanted.finished.usage.num_prompt_tokens
    assert answer.usage.completion_tokens == 16


async def test_several_choices_with_logprobs(harness: Harness) -> None:
    stream = await harness.openai.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=6, n=3, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts, reasons, usage = await read(stream)
    assert set(texts) == {0, 1, 2}
    assert len(set(texts.values())) == 3
    assert reasons == dict.fromkeys(texts, "length")
    assert usage.completion_tokens == 18

    whole = await harness.openai.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )  # greedy: a drawn token may be half a character, of which the gateway has no entry
    reported = whole.choices[0].logprobs.content
    assert len(reported) == 6
    assert all(len(one.top_logprobs) == 2 for one in reported)
    assert "".join(one.token for one in reported) == whole.choices[0].message.content


async def test_a_stop_string_ends_the_workers_request(harness: Harness) -> None:
    """The gateway alone would truncate the text but let the worker run to the end."""
    long = await harness.openai.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=40, temperature=0.0
    )
    text = long.choices[0].message.content
    stop = text[len(text) // 4 : len(text) // 4 + 6]
    stream = await harness.openai.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=40, temperature=0.0, stop=stop, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip

    texts, reasons, usage = await read(stream)

    assert texts == {0: text[: text.index(stop)]}
    assert reasons == {0: "stop"}
    assert usage.completion_tokens < 40


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_disconnected_client_cancels_the_workers_request(
    harness: Harness, is_stream: bool
) -> None:
    before = [num_made(await one.get_stats()) for one in harness.operations]
    call = harness.openai.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=900, stream=is_stream
    )
    if is_stream:
        stream = await call
        await anext(aiter(stream))
        await stream.close()
    else:
        task = asyncio.create_task(call)
        await until_one_runs(harness.operations)
        task.cancel()

    for one, num_before in zip(harness.operations, before, strict=True):
        stats = await until_stats(one, is_idle)
        assert num_made(stats) - num_before < 900, "it was not aborted"


async def until_one_runs(operations: list[OperationsClient]) -> None:
    watches = [asyncio.create_task(until_stats(one, is_running)) for one in operations]
    await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
    for watch in watches:
        watch.cancel()
    await asyncio.gather(*watches, return_exceptions=True)


def is_running(stats: Any) -> bool:
    return bool(model_of(stats).num_processing)


def num_made(stats: Any) -> int:
    return int(model_of(stats).totals.num_completion_tokens)


def is_idle(stats: Any) -> bool:
    return not model_of(stats).num_processing and not model_of(stats).num_pending


async def test_a_constraint_is_rejected_where_the_executor_has_none(harness: Harness) -> None:
    with pytest.raises(openai().APIStatusError) as caught:
        await harness.openai.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=8, response_format={"type": "json_object"}
        )

    assert caught.value.status_code == 501
    assert "json_schema" in str(caught.value)


async def test_invalid_fields_are_reported_by_their_gateway_name(harness: Harness) -> None:
    with pytest.raises(openai().BadRequestError) as caught:
        await harness.openai.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=8, stop="s" * 65
        )

    assert "sampling_params.stop[0]" in str(caught.value)


async def test_a_trace_covers_caller_gateway_and_engine(
    harness: Harness,
) -> None:
    answer = await harness.openai.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=4,
        extra_headers={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"},
    )  # fmt: skip
    assert answer.usage.completion_tokens == 4

    spans = await asyncio.to_thread(harness.receiver.wait_for_names, TRACE_ID, WANTED_SPANS)

    by_name = {span.name: span for span in spans}
    root = by_name["vllm.grpc.engine.VllmEngine/Generate"]
    gateways = {span.span_id: span.name for span in spans if span.name in GATEWAY_SPANS}
    assert gateways[root.parent_span_id] == "grpc_execute"
    assert by_name["http_request"].parent_span_id.hex() == SPAN_ID
    assert {by_name[name].parent_span_id for name in ("queue", "prefill", "decode")} == {
        root.span_id
    }


GATEWAY_SPANS = ("http_request", "grpc_execute")
WANTED_SPANS = frozenset(
    (*GATEWAY_SPANS, "vllm.grpc.engine.VllmEngine/Generate", "queue", "prefill", "decode")
)


async def test_the_gateway_reports_its_workers_and_their_load(harness: Harness) -> None:
    listed = (await harness.gateway.get("/workers"))["workers"]
    assert {one["url"] for one in listed} == {f"grpc://{w.address}" for w in harness.workers}
    for one in listed:
        assert one["is_healthy"]
        assert one["runtime_type"] == "vllm"
        assert one["model_id"] == "demo"
        assert one["labels"]["max_num_seqs"] == "64"
        assert one["labels"]["page_size"] == "16"

    async with asyncio.timeout(TEST_TIMEOUT_S):
        # The gateway queries its workers, and omits one that responds slowly.
        while not (loads := (await harness.gateway.get("/loads"))["loads"]):
            pass
    assert all(one["max_running_requests"] == 64 for one in loads)
    assert all(one["max_total_num_tokens"] > 0 for one in loads)
