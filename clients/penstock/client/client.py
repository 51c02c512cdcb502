"""The asyncio client of a Penstock server.

Owns what its callers see of generating. How a call is made is written in `calls.py`; what it
may raise is drawn in `errors.py`; when it is tried again is written in `retry.py`.
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
from typing import Any, ClassVar, Self, Unpack

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
from penstock.client.prompt import ChatMessage, ChatPrompt, PromptLike
from penstock.client.resuming import ResumePoint
from penstock.client.retry import Attempts, RetryPolicy
from penstock.client.runtime import ASYNCIO, Canceller, Runtime
from penstock.client.service_config import check_service_config
from penstock.client.trace_context import TraceContext


class Client(ModelCalls):
    """Talks to one service. Use it from one event loop; it may serve any number of tasks.

    Every call raises a `PenstockError` when it fails, ValueError or TypeError for arguments that
    do not fit the contract, RuntimeError on a closed client. `deadline_s` is the time a call may
    take in seconds, all attempts together and the wait for a turn with them; the server learns it
    as the gRPC deadline. `trace` stands in for the current OpenTelemetry context. `metadata` is
    sent with the call.
    """

    _runtime: ClassVar[Runtime] = ASYNCIO

    def __init__(  # noqa: PLR0913 - each is one choice of whoever makes a client
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
        """Connects at the first call. Without `tls` or `credentials` the connection is plain text.

        `token`: the bearer token of every call, or what is asked for it before each; not over plain
        text to another machine (ValueError). `tls` True: TLS as the system believes in authorities.
        `address`: HOST:PORT (50051 for a host alone) or another gRPC target, or several of them,
        in a sequence or with commas between; ValueError for what is neither. `metadata` goes with
        every call, e.g. `authorization`. `pool`: how many connections and calls. `multiplex`: send
        all generations of a connection over one Multiplex call. `resume_grace_s`: how long streams
        outlive a lost connection, where the request does not say. `settings` replaces `retry` and
        `metadata` as a whole; with it and `sleep` tests bring their own time.
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

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Take no more calls, wait up to `grace_s` for open ones, cancel the rest and hang up.

        Calls that wait for their turn end at once. May be called twice.
        """
        await self._calls.close(grace_s)

    @property
    def pool_state(self) -> PoolState:
        """How many connections and calls there are now."""
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
        """Stream the events of one generation: Accepted first, Finished last.

        Sent when iteration starts. Leaving the iterator early (closing it, a `break`, a
        cancelled task, Ctrl-C) cancels the request; `contextlib.aclosing`, `closing` for the
        blocking client, makes that prompt. A call that is tried again begins anew with Accepted;
        that never happens after output was delivered.
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
        """Stream the rest of a request that outlived its stream, from `point` on.

        A request id alone asks for all of it. Whoever still reads the older stream meets
        StreamSuperseded there. Connections that are lost again are made good for `resume_grace_s`,
        the client's own unless given; leaving the iterator early then cancels the request, and
        otherwise leaves it to its grace. Raises RequestNotFound when that is over,
        SequenceUnavailable for messages that are no longer kept.
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
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        trace: TraceContext | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[Event, None]:
        """Stream the events of the next message of a conversation; as `generate`.

        `tools`, `template_arguments`: see `ChatPrompt`.
        """
        prompt = ChatPrompt(
            messages=tuple(messages), tools=tuple(tools), template_arguments=template_arguments
        )
        return self.generate(
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
        """Stream the text of one output, in pieces that are never empty. `n` must be 1."""
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
        """Generate and answer as a whole. Give a deadline: nothing comes before the end."""
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
        """Generate for many prompts, `max_concurrency` at a time: (index, event) as they come.

        A request that fails ends with (index, PenstockError), and the others go on. The next one
        is taken from `requests` when one has ended, so that they may be endless; no more are open
        than `PoolConfig.max_concurrent_calls` allows. Whoever iterates slowly slows the streams
        down. `deadline_s` holds for each request from its start; `options` are those of each.
        Leaving the iterator early cancels what is open. Raises ValueError or TypeError for a
        request that does not fit the contract, which ends the batch.
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
        """Generate for many prompts; the results in the order of `requests`.

        A request that fails has its PenstockError there. `on_event` is called with (index, event)
        for each event as it comes, in this task or thread; what it raises ends the batch.
        Otherwise as `generate_many`.
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
        """Cancel a live request of the same tenant; where it stood. Raises RequestNotFound."""
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


async def _texts(events: AsyncGenerator[Event, None]) -> AsyncGenerator[str, None]:
    try:
        async for event in events:
            if isinstance(event, Tokens) and event.text:
                yield event.text
    finally:
        await events.aclose()
