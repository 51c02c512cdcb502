"""The asyncio client of a Penstock server.

Contains the public class. `calls.py` makes the calls; `retry.py` decides when they are retried.
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
from numbers import Real
from typing import Any, ClassVar, Self, Unpack, cast

import grpc

import penstock.v1 as pb
from penstock.client.argument_types import require_number, require_type
from penstock.client.batch import (
    DEFAULT_MAX_CONCURRENCY,
    BatchItem,
    BatchRequest,
    BatchResults,
    GenerationBuilder,
    OnEvent,
    batch_width,
    errors_at,
    require_requests,
)
from penstock.client.call_settings import (
    CONTROL_DEADLINE_S,
    CallSettings,
    Metadata,
    Pairs,
    metadata_pairs,
    require_one_output,
)
from penstock.client.calls import Calls
from penstock.client.channel import DEFAULT_ADDRESS, ChannelConfig, grpc_targets
from penstock.client.connections import Connections
from penstock.client.credentials import TlsConfig, Token, channel_credentials, check_token
from penstock.client.decoding import decode_generation, decode_state
from penstock.client.encoding import encode_request, filled
from penstock.client.errors import PenstockError
from penstock.client.events import Event, Generation, RequestState, Tokens
from penstock.client.model_calls import ModelCalls
from penstock.client.multiplex import MultiplexConfig, multiplex_config
from penstock.client.options import (
    GenerationOptions,
    GenerationRequest,
    build_request,
    with_resume_timeout,
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

    All calls raise `PenstockError` when they fail, ValueError or TypeError for invalid arguments,
    and RuntimeError on a closed client.

    Common arguments of the calls:

    - `deadline_s`: the seconds that a call may take, with all attempts and the wait for admission
      (`PoolConfig.max_concurrent_calls`); None: no limit. Each attempt sends the remaining time as
      its gRPC deadline.
    - `trace`: the trace context of the call; None: the context of the current OpenTelemetry span,
      if any.
    - `metadata`: gRPC metadata of the call; not allowed for generations with `multiplex`.
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
        resume_timeout_s: float | None = None,
        settings: CallSettings | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create a client. It connects at its first call: with `tls` or `credentials` if given,
        otherwise in plain text.

        Args:
            address: HOST, HOST:PORT (default 50051) or another gRPC target; several in a sequence
                or separated by commas.
            token: Bearer token of all calls, or a function that returns it and is called for each
                call. Raises ValueError if the token would cross a network in plain text.
            tls: True for the system's certificate authorities, or a `TlsConfig`.
            credentials: gRPC channel credentials, instead of `tls`.
            metadata: Sent with all calls.
            retry: When failed calls are retried; None: `RetryPolicy()`, four attempts.
            channel: Settings of the connections.
            pool: Numbers of connections and of concurrent generations.
            multiplex: Send the generations of a connection over one Multiplex call at a time,
                instead of one call for each.
            resume_timeout_s: Seconds for which the server keeps a streamed request after its
                connection is lost; a request may set another value. None: the request ends with its
                connection.
            settings: Replaces `retry` and `metadata`, for tests that control time.
            sleep: Waits between attempts, for tests that control time.

        Raises ValueError or TypeError for an invalid argument, and OSError for a PEM file that
        cannot be read.
        """
        require_type(retry, "retry", RetryPolicy, None)
        require_type(channel, "channel", ChannelConfig, None)
        require_type(pool, "pool", PoolConfig, None)
        settings = settings or CallSettings(
            retry=retry or RetryPolicy(), metadata=metadata_pairs(metadata)
        )
        credentials = channel_credentials(tls, credentials)
        targets = grpc_targets(address)
        if token is not None:
            check_token(token, targets, is_encrypted=credentials is not None)
            settings = dataclasses.replace(settings, token=token)
        self._pool_config = pool or PoolConfig()
        _require_resume_timeout(resume_timeout_s)
        self._resume_timeout_s = resume_timeout_s
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

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pool_state(self) -> PoolState:
        """The current numbers of connections and generations."""
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
        cancelled task, Ctrl-C) cancels the request; with `contextlib.aclosing` (`closing` for the
        blocking client) it is cancelled immediately. A retried call starts again with `Accepted`. A
        call is not retried once output has arrived.
        """
        wanted = with_resume_timeout(build_request(prompt, options), self._resume_timeout_s)
        request = encode_request(wanted)
        attempts = self._calls.settings.attempts(deadline_s)
        return self._calls.stream(
            request, attempts, self._calls.generation_metadata(metadata, trace)
        )

    def resume(
        self,
        point: ResumePoint | str,
        *,
        resume_timeout_s: float | None = None,
        deadline_s: float | None = None,
        trace: TraceContext | None = None,
        metadata: Metadata = (),
    ) -> AsyncGenerator[Event, None]:
        """Stream the remaining events of a request from `point` on, after its stream was lost.

        If `point` is a request id, the stream begins at its first message. An older stream of the
        request ends with `StreamSuperseded`. If the connection is lost again, the client resumes
        again within `resume_timeout_s` seconds; None means the client's setting. If this time is
        above 0, leaving the iterator early cancels the request; if it is 0, the request continues
        for its resume timeout. Raises `RequestNotFound` after the resume timeout, and
        `SequenceUnavailable` if the stream cannot be continued at `point`.
        """
        require_type(point, "point", ResumePoint, str)
        _require_resume_timeout(resume_timeout_s)
        if isinstance(point, str):
            point = ResumePoint(request_id=point)
        resume_timeout_s = self._resume_timeout_s if resume_timeout_s is None else resume_timeout_s
        settings = self._calls.settings
        return self._calls.resume(
            point,
            settings.attempts(deadline_s),
            settings.call_metadata(metadata, trace),
            resume_timeout_s=resume_timeout_s or 0.0,
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
        """Stream the events of the next message of a conversation. The rest is as in `generate`.

        `messages` are `ChatMessage` values or dicts such as {"role": "user", "content": "Hello"},
        the oldest first; a str is one message of the user. For `tools` and `template_arguments` see
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
        """Return the complete next message of a conversation. The rest is as in `generate_once`."""
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
        """Stream the text of one output, in non-empty strings. Raises ValueError if `n` is set to
        anything but 1."""
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
        """Return a complete generation. Set a deadline, because nothing is delivered before the
        end."""
        message = encode_request(build_request(prompt, options))
        attempts = self._calls.settings.attempts(deadline_s)
        pairs = self._calls.generation_metadata(metadata, trace)
        if self._calls.is_multiplexed:
            return await self._collect(message, attempts, pairs)
        request = pb.GenerateOnceRequest(generation=message)
        async with self._calls.pool.admitted(attempts.timeout_s()):
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
        max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
        deadline_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[BatchItem, None]:
        """Generate for many prompts, `max_concurrency` at a time; stream (index, event) pairs.

        A request that fails ends with (index, PenstockError); the others continue. `requests` may
        be endless: the next request is taken when one has ended. `PoolConfig.max_concurrent_calls`
        also limits the open requests. A slow reader slows down the streams. `deadline_s` counts
        from the start of each request; `options` apply to each request. Leaving the iterator early
        cancels the open requests. Invalid `options` raise ValueError or TypeError immediately. An
        invalid request ends the batch with such an error, naming the index of the request.
        """
        require_requests(requests)
        width = batch_width(max_concurrency, self._pool_config.max_concurrent_calls)
        # An invalid option is an error of the call, not of its first request.
        encode_request(build_request("", options))

        def start(
            index: int, request: BatchRequest, canceller: Canceller | None = None
        ) -> AsyncGenerator[Event, None]:
            with errors_at(index):
                wanted = with_resume_timeout(
                    build_request(request, options), self._resume_timeout_s
                )
                message = encode_request(wanted)
            return self._calls.stream(
                message,
                self._calls.settings.attempts(deadline_s),
                self._calls.generation_metadata(metadata, None),
                canceller=canceller,
            )

        return self._runtime.read_batch(requests, start, width)

    async def generate_all(
        self,
        requests: Iterable[BatchRequest] | AsyncIterable[BatchRequest],
        *,
        max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
        on_event: OnEvent | None = None,
        deadline_s: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> list[Generation | PenstockError]:
        """Generate for many prompts; return the results in the order of `requests`.

        The result of a request that fails is its `PenstockError`. `on_event` is called with (index,
        event) for each event, in the calling task or thread; an exception in it ends the batch. The
        rest is as in `generate_many`.
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
        """Cancel a request of the caller's tenant and return its state before the cancellation.

        A request that has ended and is still kept by the server is unchanged: its final state is
        returned. Raises `RequestNotFound` if the server does not have the request.
        """
        request = filled(pb.CancelRequest(), request_id=request_id)
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
            self._calls.stream(request, attempts, metadata, is_buffered=True)
        ) as events:
            async for event in events:
                builder.add(event)
        return builder.result()


def _require_resume_timeout(resume_timeout_s: float | None) -> None:
    if resume_timeout_s is not None:
        require_number(resume_timeout_s, "resume_timeout_s", Real, at_least=0)


def _conversation(
    messages: str | Sequence[ChatMessageLike],
    tools: Sequence[Mapping[str, Any]],
    template_arguments: Mapping[str, Any] | None,
) -> ChatPrompt:
    given = cast(object, messages)  # Without a type checker, callers may pass values of any type.
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
