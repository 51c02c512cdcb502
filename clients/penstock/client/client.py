"""The asyncio client of a Penstock server.

Owns the public class. `calls.py` makes the calls, `errors.py` has their exceptions, `retry.py` the
retries.
"""

import asyncio
import dataclasses
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from types import TracebackType
from typing import Any, ClassVar, Self, Unpack, cast

import grpc

import penstock.v1 as pb
from penstock.client.batch import (
    BatchItem,
    BatchRequest,
    BatchResults,
    GenerationBuilder,
    OnEvent,
    batch_width,
    require_requests,
)
from penstock.client.call_settings import (
    CONTROL_DEADLINE_S,
    CallSettings,
    Metadata,
    Pairs,
    require_one_output,
)
from penstock.client.calls import Calls
from penstock.client.channel import DEFAULT_ADDRESS, ChannelConfig, grpc_targets
from penstock.client.connections import Connections
from penstock.client.credentials import TlsConfig, Token, channel_credentials, check_token
from penstock.client.decoding import decode_generation, decode_state
from penstock.client.encoding import encode_request
from penstock.client.errors import PenstockError
from penstock.client.events import Event, Generation, RequestState, Tokens
from penstock.client.model_calls import ModelCalls
from penstock.client.multiplex import MultiplexConfig, multiplex_config
from penstock.client.options import (
    GenerationOptions,
    GenerationRequest,
    build_request,
    with_grace,
)
from penstock.client.pool import PoolConfig, PoolState
from penstock.client.prompt import ChatMessageLike, ChatPrompt, PromptLike
from penstock.client.resuming import ResumePoint
from penstock.client.retry import Attempts, RetryPolicy
from penstock.client.runtime import ASYNCIO, Canceller, Runtime
from penstock.client.service_config import check_service_config
from penstock.client.trace_context import TraceContext


class Client(ModelCalls):
    """The asyncio client of a server. Use it in one event loop; any number of tasks may share it.

    Every call raises `PenstockError` when it fails, ValueError or TypeError for arguments that do
    not fit the contract, RuntimeError on a closed client. `deadline_s`: seconds that a call may
    take, with all attempts and the wait for admission; it is sent as the gRPC deadline. `trace`:
    the trace of the call; None: the trace of the current OpenTelemetry span. `metadata`: gRPC
    metadata of the call.
    """

    _runtime: ClassVar[Runtime] = ASYNCIO

    def __init__(  # noqa: PLR0913 - each is an option of a client
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        token: Token | None = None,
        tls: bool | TlsConfig = False,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
        retry: RetryPolicy | None = None,
        channel: ChannelConfig | None = None,
        pool: PoolConfig | None = None,
        multiplex: bool | MultiplexConfig = False,
        resume_grace_s: float | None = None,
        settings: CallSettings | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """The client connects at its first call, in plain text without `tls` or `credentials`.

        `address`: HOST, HOST:PORT (default 50051) or another gRPC target; several in a sequence or
        separated by commas. `token`: bearer token of every call, or a function that returns it,
        called for each; ValueError if it would cross a network in plain text. `tls`: True, with the
        system's authorities, or a `TlsConfig`. `credentials`: gRPC's own, in place of `tls`.
        `metadata`: sent with every call. `pool`: numbers of connections and calls. `multiplex`:
        send all generations of a connection over one Multiplex call. `resume_grace_s`: seconds for
        which streams survive a lost connection, unless the request sets it. `settings` replaces
        `retry` and `metadata`; it and `sleep` let tests control time.
        """
        settings = settings or CallSettings(retry=retry or RetryPolicy(), metadata=tuple(metadata))
        credentials = channel_credentials(tls, credentials)
        targets = grpc_targets(address)
        if token is not None:
            check_token(token, targets, is_encrypted=credentials is not None)
            settings = dataclasses.replace(settings, token=token)
        self._pool_config = pool or PoolConfig()
        self._resume_grace_s = resume_grace_s
        channel = channel or ChannelConfig()
        if channel.service_config is not None:
            check_service_config(channel.service_config, settings.retry)
        connections = Connections(
            self._runtime,
            targets,
            config=self._pool_config,
            channel=channel,
            credentials=credentials,
            clock=settings.clock,
        )
        multiplexing = multiplex_config(multiplex, max_message_bytes=channel.max_message_bytes)
        super().__init__(
            Calls(
                connections,
                runtime=self._runtime,
                settings=settings,
                multiplex=multiplexing,
                sleep=sleep,
            )
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def pool_state(self) -> PoolState:
        """Numbers of connections and calls now."""
        return self._calls.pool.state

    def generate(
        self,
        prompt: PromptLike | GenerationRequest,
        *,
        deadline_s: float | None = None,
        trace: TraceContext | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[Event, None]:
        """Stream the events of one generation: `Accepted` first, `Finished` last.

        The request is sent when iteration starts. Leaving the iterator early (`aclose`, `break`, a
        cancelled task, Ctrl-C) cancels it, at once with `contextlib.aclosing` (`closing` for the
        blocking client). A retried call starts again with `Accepted`; it is never retried after
        output.
        """
        wanted = with_grace(build_request(prompt, options), self._resume_grace_s)
        request = encode_request(wanted)
        attempts = self._calls.settings.attempts(deadline_s)
        return self._calls.stream(request, attempts, self._calls.pairs(metadata, trace))

    def resume(
        self,
        point: ResumePoint | str,
        *,
        resume_grace_s: float | None = None,
        deadline_s: float | None = None,
        trace: TraceContext | None = None,
        metadata: Metadata = (),
    ) -> AsyncGenerator[Event, None]:
        """Stream the remaining events of a request after its stream was lost, from `point` on.

        With a request id instead of a point, the stream begins at its first message. An older
        stream of the request ends with `StreamSuperseded`. Connections that are lost again are
        restored for `resume_grace_s` seconds, by default the client's; then leaving the iterator
        early cancels the request, otherwise the request continues for its grace period. Raises
        `RequestNotFound` after the grace period, and `SequenceUnavailable` for messages that are no
        longer kept.
        """
        if isinstance(point, str):
            point = ResumePoint(request_id=point)
        grace_s = self._resume_grace_s if resume_grace_s is None else resume_grace_s
        settings = self._calls.settings
        return self._calls.resume(
            point,
            settings.attempts(deadline_s),
            settings.call_metadata(metadata, trace),
            grace_s=grace_s or 0.0,
        )

    def chat(
        self,
        messages: str | Sequence[ChatMessageLike],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        trace: TraceContext | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[Event, None]:
        """Stream the events of the next message of a conversation; otherwise as `generate`.

        `messages`: `ChatMessage` values or dicts such as {"role": "user", "content": "Hello"},
        oldest first; a str is one message of the user. `tools`, `template_arguments`: see
        `ChatPrompt`.
        """
        prompt = _conversation(messages, tools, template_arguments)
        return self.generate(
            prompt, deadline_s=deadline_s, trace=trace, metadata=metadata, **options
        )

    async def chat_once(
        self,
        messages: str | Sequence[ChatMessageLike],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        trace: TraceContext | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Return the next message of a conversation as a whole: like `chat` and `generate_once`."""
        prompt = _conversation(messages, tools, template_arguments)
        return await self.generate_once(
            prompt, deadline_s=deadline_s, trace=trace, metadata=metadata, **options
        )

    def generate_text(
        self,
        prompt: PromptLike | GenerationRequest,
        *,
        deadline_s: float | None = None,
        trace: TraceContext | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[str, None]:
        """Stream the text of one output, in pieces that are not empty. `n` must be 1."""
        request = build_request(prompt, options)
        require_one_output(request)
        events = self.generate(request, deadline_s=deadline_s, trace=trace, metadata=metadata)
        return _texts(events)

    async def generate_once(
        self,
        prompt: PromptLike | GenerationRequest,
        *,
        deadline_s: float | None = None,
        trace: TraceContext | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Return a whole generation. Set a deadline: nothing is delivered before the end."""
        message = encode_request(build_request(prompt, options))
        attempts = self._calls.settings.attempts(deadline_s)
        pairs = self._calls.pairs(metadata, trace)
        if self._calls.is_multiplexed:
            return await self._collect(message, attempts, pairs)
        request = pb.GenerateOnceRequest(generation=message)
        async with self._calls.pool.turn(attempts.timeout_s()):
            response = await self._calls.unary(
                lambda channel: pb.GenerationServiceStub(channel).GenerateOnce,
                request,
                attempts,
                pairs,
                request_id=message.request_id,
            )
        return decode_generation(response)

    def generate_many(
        self,
        requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest],
        *,
        max_concurrency: int,
        deadline_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[BatchItem, None]:
        """Generate for many prompts, `max_concurrency` at a time; stream (index, event) pairs.

        A request that fails ends with (index, PenstockError); the others continue. `requests` may
        be endless: the next one is taken when one has ended, and no more are open than
        `PoolConfig.max_concurrent_calls`. A slow reader slows the streams down. `deadline_s` counts
        from the start of each request; `options` apply to each. Leaving the iterator early cancels
        what is open. ValueError or TypeError for a request that does not fit the contract ends the
        batch.
        """
        require_requests(requests)
        width = batch_width(max_concurrency, self._pool_config.max_concurrent_calls)

        def start(
            request: BatchRequest, canceller: Canceller | None = None
        ) -> AsyncGenerator[Event, None]:
            wanted = with_grace(build_request(request, options), self._resume_grace_s)
            return self._calls.stream(
                encode_request(wanted),
                self._calls.settings.attempts(deadline_s),
                self._calls.pairs(metadata, None),
                canceller=canceller,
            )

        return self._runtime.read_batch(requests, start, width)

    async def generate_all(
        self,
        requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest],
        *,
        max_concurrency: int,
        on_event: OnEvent | None = None,
        deadline_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> list[Generation | PenstockError]:
        """Generate for many prompts; return the results in the order of `requests`.

        The result of a request that fails is its `PenstockError`. `on_event` is called with (index,
        event) for each event, in this task or thread; an exception in it ends the batch. Otherwise
        as `generate_many`.
        """
        results = BatchResults(on_event)
        items = self.generate_many(
            requests,
            max_concurrency=max_concurrency,
            deadline_s=deadline_s,
            metadata=metadata,
            **options,
        )
        async with aclosing(items):
            async for item in items:
                results.add(item)
        return results.in_order()

    async def cancel(
        self,
        request_id: str,
        *,
        deadline_s: float | None = CONTROL_DEADLINE_S,
        trace: TraceContext | None = None,
        metadata: Metadata = (),
    ) -> RequestState:
        """Cancel a live request of the tenant; return its last state. Raises `RequestNotFound`."""
        request = pb.CancelRequest(request_id=request_id)
        settings = self._calls.settings
        response = await self._calls.unary(
            lambda channel: pb.GenerationServiceStub(channel).Cancel,
            request,
            settings.attempts(deadline_s),
            settings.call_metadata(metadata, trace),
        )
        return decode_state(response.state)

    async def _collect(
        self, request: pb.GenerateRequest, attempts: Attempts, metadata: Pairs
    ) -> Generation:
        builder = GenerationBuilder()
        async with aclosing(
            self._calls.stream(request, attempts, metadata, is_whole=True)
        ) as events:
            async for event in events:
                builder.add(event)
        return builder.result()


def _conversation(
    messages: str | Sequence[ChatMessageLike],
    tools: Sequence[Mapping[str, Any]],
    template_arguments: Mapping[str, Any] | None,
) -> ChatPrompt:
    given = cast(object, messages)  # callers without a type checker pass anything
    if isinstance(messages, str):
        messages = ({"role": "user", "content": messages},)
    elif isinstance(given, Mapping) or not isinstance(given, Iterable):
        kind = type(messages).__name__
        raise TypeError(f"messages: must be a str or a sequence of messages, not {kind}")
    return ChatPrompt(
        messages=tuple(messages), tools=tuple(tools), template_arguments=template_arguments
    )


async def _texts(events: AsyncGenerator[Event, None]) -> AsyncGenerator[str, None]:
    try:
        async for event in events:
            if isinstance(event, Tokens) and event.text:
                yield event.text
    finally:
        await events.aclose()
