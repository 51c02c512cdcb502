"""The real gateway passes on or drops each field as the rows of docs/gateway.md state.

The worker supports constraints; a relay in front of it records what it receives.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from gateway.smg import Gateway, launched_gateway, openai_client
from support.fake_trtllm import child_environment
from support.service import started
from support.timeout import TEST_TIMEOUT_S

# A gRPC proxy between gateway and worker: it changes nothing and records all calls.

_OWN_KEYS = ("user-agent",)
"""Each of the two connections has its own value."""


@dataclass(slots=True)
class Call:
    """One call: its method, the caller's metadata and deadline, and the messages in both
    directions.

    `left_s`: seconds until the deadline when the call arrived, None without a deadline.
    """

    method: str
    metadata: dict[str, str | bytes]
    left_s: float | None
    requests: list[bytes] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)


class RecordingRelay(grpc.GenericRpcHandler):
    """A gRPC relay that records `calls`, in order of arrival. While `is_shut` is True it rejects
    all calls with UNAVAILABLE.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.address = ""
        self.calls: list[Call] = []
        self.is_shut = False

    def to(self, method: str) -> list[Call]:
        return [call for call in self.calls if call.method.endswith(f"/{method}")]

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        return grpc.stream_stream_rpc_method_handler(functools.partial(self._forward, method))

    async def _forward(
        self, method: str, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        metadata = [pair for pair in context.invocation_metadata() if pair[0] not in _OWN_KEYS]
        left_s = context.time_remaining()
        # gRPC reports the longest possible deadline for a call without one.
        seen = Call(method, dict(metadata), left_s if left_s and left_s < 1e6 else None)
        self.calls.append(seen)
        if self.is_shut:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "shut")

        async def kept() -> AsyncIterator[bytes]:
            async for request in requests:
                seen.requests.append(request)
                yield request

        stub: Any = self._channel.stream_stream(method)
        call = stub(kept(), timeout=seen.left_s, metadata=metadata)
        try:
            async for answer in call:
                seen.answers.append(answer)
                yield answer
        except grpc.aio.AioRpcError as error:
            context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
            await context.abort(error.code(), error.details() or "")
        except asyncio.CancelledError:
            call.cancel()
            raise


@asynccontextmanager
async def recording_relay(address: str) -> AsyncGenerator[RecordingRelay]:
    """Start a relay to the service at `address`; `relay.address` is the address of the relay."""
    async with grpc.aio.insecure_channel(
        address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        relay = RecordingRelay(channel)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((relay,))
        port = server.add_insecure_port("127.0.0.1:0")
        relay.address = f"127.0.0.1:{port}"
        await server.start()
        try:
            yield relay
        finally:
            await server.stop(0)


pytestmark = pytest.mark.asyncio(loop_scope="module")
DEFAULT_MAX_TOKENS = 7
MAX_SEATED, MAX_WAITING = 2, 1
MAX_LOOKS = 30
WORKER = (
    *("--executor", "trtllm", "--gateway", "smg", "--fronts", "1"),
    *("--trtllm-config", json.dumps({
        "guided_decoding_backend": "xgrammar", "max_batch_size": MAX_SEATED,
    })),
    *("--max-num-waiting", str(MAX_WAITING), "--default-max-tokens", str(DEFAULT_MAX_TOKENS)),
)  # fmt: skip
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Where?"}]},
    TEXT: {"prompt": "Where?"},
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}, "number": {"type": "integer"}},
    "required": ["city", "number"],
}
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6"
    "kgAAAABJRU5ErkJggg=="
)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def text(self) -> str:
        choice = self.body["choices"][0]
        text: str = choice["message"]["content"] if "message" in choice else choice["text"]
        return text

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.body["error"]
        return error


@dataclass
class Harness:
    """The gateway, the relay to its worker, and the gateway's response to a request from before it
    had a worker.
    """

    gateway: Gateway
    relay: RecordingRelay
    first_answer: Answer

    async def post(
        self, path: str, headers: dict[str, str] | None = None, **options: Any
    ) -> Answer:
        body = {"model": "demo", **PROMPTS.get(path, {}), **options}
        return await asyncio.to_thread(posted, f"{self.gateway.url}{path}", body, headers or {})

    async def sent(self, path: str, headers: dict[str, str] | None = None, **options: Any) -> Any:
        """Send a request; return the GenerateRequest that the worker received."""
        num_before = len(self.relay.to("Generate"))
        await self.post(path, headers, **options)
        (call,) = self.relay.to("Generate")[num_before:]
        return generation(call.requests[0])

    async def params(self, path: str, **options: Any) -> dict[str, Any]:
        """Send a request; return the sampling parameters that the worker received, by name."""
        message = (await self.sent(path, **options)).sampling_params
        return {field.name: value for field, value in message.ListFields()}


def posted(url: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"content-type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=TEST_TIMEOUT_S) as response:
            return Answer(response.status, lowered(response.headers), json.loads(response.read()))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, lowered(error.headers), json.loads(error.read()))


def lowered(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def generation(data: bytes) -> Any:
    # Imported here, because the module is skipped if the package is not installed.
    from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

    return vllm.GenerateRequest.FromString(data)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[Harness]:
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(
            started(*WORKER, environment=child_environment(step_s=0.01))
        )
        relay = await stack.enter_async_context(recording_relay(worker.address))
        relay.is_shut = True
        made = await stack.enter_async_context(launched_gateway(relay.address))
        first = await first_answer(made)
        relay.is_shut = False
        await made.until_workers(1)
        yield Harness(made, relay, first)


async def first_answer(made: Gateway) -> Answer:
    """Return the gateway's response to a request while it has no worker. Retries until the gateway
    listens, because the gateway does not log when it does.
    """
    body = {"model": "demo", **PROMPTS[CHAT]}
    for num in range(1, MAX_LOOKS):
        await made.until_logged("Step retrying", num)
        with contextlib.suppress(urllib.error.URLError):
            return await asyncio.to_thread(posted, f"{made.url}{CHAT}", body, {})
    raise AssertionError("it does not listen")


async def test_without_a_worker_the_gateway_reports_an_unknown_model(harness: Harness) -> None:
    assert (harness.first_answer.status, harness.first_answer.error["code"]) == (
        404,
        "model_not_found",
    )
    assert harness.relay.calls[0].answers == []
    assert (await harness.post(CHAT)).status == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_sampling_options_are_passed_on(harness: Harness, path: str) -> None:
    asked: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "frequency_penalty": 0.5,
        "presence_penalty": -0.5, "repetition_penalty": 1.5, "seed": 11, "stop_token_ids": [3],
        "stop": ["a"], "ignore_eos": True, "max_tokens": 8, "n": 2,
    }  # fmt: skip

    params = await harness.params(path, **asked)

    assert {name: params.get(name) for name in asked} == asked


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_without_max_tokens_the_services_default_applies(harness: Harness, path: str) -> None:
    answer = await harness.post(path, ignore_eos=True)

    assert answer.body["usage"]["completion_tokens"] == DEFAULT_MAX_TOKENS
    assert "max_tokens" not in await harness.params(path)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_seeds_beyond_32_bits_are_clamped(harness: Harness, path: str) -> None:
    low, high = -(2**31), 2**31 - 1
    for seed, reported in ((-1, -1), (low, low), (high, high), (2**31, high), (-(2**40), low)):
        assert (await harness.params(path, seed=seed))["seed"] == reported


async def test_an_openai_client_gets_what_its_json_schema_specifies(harness: Harness) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "place", "strict": True, "schema": CITY},
    }
    async with openai_client(harness.gateway) as client:
        ask: Any = client.chat.completions.create
        asked: dict[str, Any] = {"model": "demo", **PROMPTS[CHAT], "max_tokens": 64}
        whole = await ask(**asked, response_format=form)
        stream = await ask(**asked, response_format=form, stream=True)
        chunks = [chunk async for chunk in stream]
        free = await ask(**asked, temperature=0.0)

    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    for text in (whole.choices[0].message.content, streamed):
        assert json.loads(text) == {"city": "Oslo", "number": 0}
    assert whole.choices[0].finish_reason == "stop"
    with pytest.raises(json.JSONDecodeError):
        json.loads(free.choices[0].message.content)


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "(yes|yes)"}, "yes"),
    "ebnf": ({"ebnf": 'root ::= "abc"'}, "abc"),
}


@pytest.mark.parametrize(
    ("path", "form", "text"),
    [
        *((path, *FORMS[name]) for path in (CHAT, TEXT) for name in FORMS),
        (CHAT, {"response_format": {"type": "json_object"}}, "{}"),
        (TEXT, {"json_schema": json.dumps({"enum": ["Oslo"]})}, '"Oslo"'),
    ],
)
async def test_regex_and_grammar_constraints_are_passed_on(
    harness: Harness, path: str, form: dict[str, Any], text: str
) -> None:
    assert (await harness.post(path, max_tokens=32, **form)).text == text


@pytest.mark.parametrize(
    ("path", "option"),
    [
        *((path, option) for path in (CHAT, TEXT) for option in (
            {"logit_bias": {"5": 100}},
            {"logit_bias": {"99999999": 100}},  # which the worker would reject
            {"prompt_logprobs": 2},
            {"truncate_prompt_tokens": 2},
            {"lora_path": "x"},
        )),
        (CHAT, {"min_tokens": 3}),
        (TEXT, {"response_format": {"type": "json_object"}}),
    ],
)  # fmt: skip
async def test_some_options_are_dropped_by_the_gateway(
    harness: Harness, path: str, option: dict[str, Any]
) -> None:
    plain = await harness.params(path, max_tokens=4)

    assert (await harness.post(path, max_tokens=4, **option)).status == 200
    assert await harness.params(path, max_tokens=4, **option) == plain


async def test_min_tokens_of_a_text_completion_are_passed_on(harness: Harness) -> None:
    assert (await harness.params(TEXT, max_tokens=8, min_tokens=3))["min_tokens"] == 3


async def test_logprobs_of_completions_are_computed_and_not_passed_on(harness: Harness) -> None:
    answer = await harness.post(TEXT, max_tokens=2, logprobs=2)

    call = harness.relay.to("Generate")[-1]
    assert generation(call.requests[0]).sampling_params.logprobs == 2
    assert not answer.body["choices"][0].get("logprobs")
    chat = await harness.post(CHAT, max_tokens=2, temperature=0, logprobs=True, top_logprobs=2)
    assert len(chat.body["choices"][0]["logprobs"]["content"]) == 2


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_logprobs_of_all_tokens_cannot_be_requested(harness: Harness, path: str) -> None:
    options: dict[str, Any] = {"logprobs": -1}
    if path == CHAT:
        options = {"logprobs": True, "top_logprobs": -1}

    assert (await harness.post(path, max_tokens=2, **options)).status == 400


async def test_tenant_and_priority_are_not_passed_on(harness: Harness) -> None:
    headers = {"x-tenant": "acme", "authorization": "Bearer secret", "x-session-id": "s"}
    options: dict[str, Any] = {
        "priority": 9,
        "user": "acme",
        "session_params": {"id": "s"},
        "max_tokens": 2,
    }

    message = await harness.sent(CHAT, headers, **options)

    call = harness.relay.to("Generate")[-1]
    assert call.left_s is None
    assert call.metadata == {}
    assert {field.name for field, _ in message.ListFields()} == {
        "request_id",
        "tokenized",
        "sampling_params",
    }


async def test_images_are_rejected_by_the_gateway(harness: Harness) -> None:
    num_before = len(harness.relay.to("Generate"))
    content = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": PIXEL}},
    ]

    answer = await harness.post(CHAT, messages=[{"role": "user", "content": content}])

    assert (answer.status, answer.error["code"]) == (400, "multimodal_not_supported")
    assert len(harness.relay.to("Generate")) == num_before


async def test_missing_methods_are_reported_to_the_client(harness: Harness) -> None:
    embedding = await harness.post("/v1/embeddings", input="x")
    assert embedding.status == 501
    assert "embeddings is not supported by this service" in embedding.error["message"]

    for path in ("/flush_cache", "/start_profile", "/stop_profile"):
        answer = await harness.post(path)
        assert len(answer.body["failed"]) == 1
        assert "not supported" in answer.body["failed"][0]["error"]


async def test_a_full_queue_is_429_without_retry_after(harness: Harness) -> None:
    """The worker's rejection has a retry delay; by default the gateway makes five attempts."""
    async with openai_client(harness.gateway) as client:
        streams = []
        for _ in range(MAX_SEATED):
            options = {"max_tokens": 1000, "stream": True, "extra_body": {"ignore_eos": True}}
            stream = await client.completions.create(model="demo", prompt="Where?", **options)
            await anext(aiter(stream))
            streams.append(stream)
        num_before = len(harness.relay.to("Generate"))
        waiting = [asyncio.create_task(harness.post(TEXT)) for _ in range(MAX_WAITING + 1)]
        done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        (rejected,) = done
        for stream in streams:
            await stream.close()
        served = [await task for task in rest]

    assert rejected.result().status == 429
    assert "retry-after" not in rejected.result().headers
    assert [one.status for one in served] == [200] * MAX_WAITING
    assert len(harness.relay.to("Generate")) - num_before == MAX_WAITING + 5
