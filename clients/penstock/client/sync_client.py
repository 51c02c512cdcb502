"""The blocking client of a Penstock server: the same contract as `client.Client`, without asyncio.

Owns one connection and the attempts of each call on it. It stands on gRPC's own blocking API rather
than on an event loop in a thread: nothing to start, to hand over to, or to leak.
"""

import time
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2

import penstock.v1 as pb
from penstock.client.call_settings import (
    CONTROL_DEADLINE_S,
    HEALTH_METHOD,
    HEALTH_WATCH_METHOD,
    MAX_NUM_PAGES,
    CallSettings,
    Metadata,
    require_one_output,
)
from penstock.client.channel import DEFAULT_ADDRESS, ChannelConfig, grpc_target
from penstock.client.decoding import decode_generation, decode_health, decode_model, decode_state
from penstock.client.encoding import encode_ids, encode_prompt, encode_request
from penstock.client.errors import Failure, StreamBroken, Unavailable
from penstock.client.events import Event, Generation, RequestState, Tokens
from penstock.client.model_info import HealthStatus, Model, Tokenization
from penstock.client.options import GenerationOptions, GenerationRequest, build_request
from penstock.client.prompt import ChatMessage, ChatPrompt, PromptLike, as_prompt
from penstock.client.retry import Attempts, RetryPolicy
from penstock.client.status import error_from_call
from penstock.client.stream_reader import StreamReader
from penstock.client.trace_context import TraceContext

_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")


class SyncClient:
    """Talks to one address. Any number of threads may use it at a time.

    Every call raises a `PenstockError` when it fails, ValueError or TypeError for arguments that
    do not fit the contract, RuntimeError on a closed client. `deadline_s` is the time a call may
    take in seconds, all attempts together; the server learns it as the gRPC deadline. `trace`
    stands in for the current OpenTelemetry context. `metadata` is sent with the call.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
        retry: RetryPolicy | None = None,
        channel: ChannelConfig | None = None,
        settings: CallSettings | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connects at the first call. Without `credentials` the connection is plain text.

        `address`: HOST:PORT (50051 for a host alone) or another gRPC target; ValueError if neither.
        `metadata` goes with every call, e.g. `authorization`. `settings` replaces `retry` and
        `metadata` as a whole; with it and `sleep` tests bring their own time.
        """
        target = grpc_target(address)
        options = (channel or ChannelConfig()).options()
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=options)
        self._settings = settings or CallSettings(
            retry=retry or RetryPolicy(), metadata=tuple(metadata)
        )
        self._sleep = sleep
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is open and hang up. May be called twice."""
        self._is_closed = True
        self._channel.close()

    def generate(
        self,
        prompt: PromptLike | GenerationRequest,
        *,
        deadline_s: float | None = None,
        trace: TraceContext | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> Generator[Event, None, None]:
        """Stream the events of one generation: Accepted first, Finished last.

        Sent when iteration starts. Leaving the iterator early (`close`, a `break`, Ctrl-C) cancels
        the request; `contextlib.closing` makes that certain. A call that is tried again begins anew
        with Accepted; that never happens after output was delivered.
        """
        request = encode_request(build_request(prompt, options))
        attempts = self._settings.attempts(deadline_s)
        return self._stream(request, attempts, self._settings.call_metadata(metadata, trace))

    def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        deadline_s: float | None = None,
        trace: TraceContext | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerationOptions],
    ) -> Generator[Event, None, None]:
        """Stream the events of the next turn of a dialogue; as `generate`."""
        prompt = ChatPrompt(messages=tuple(messages))
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
    ) -> Generator[str, None, None]:
        """Stream the text of one output, in pieces that are never empty. `n` must be 1."""
        request = build_request(prompt, options)
        require_one_output(request)
        events = self.generate(request, deadline_s=deadline_s, trace=trace, metadata=metadata)
        return _texts(events)

    def generate_once(
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
        request = pb.GenerateOnceRequest(generation=message)
        stub = pb.GenerationServiceStub(self._connect())
        return decode_generation(
            self._unary(stub.GenerateOnce, request, deadline_s, trace, metadata)
        )

    def cancel(
        self,
        request_id: str,
        *,
        deadline_s: float | None = CONTROL_DEADLINE_S,
        trace: TraceContext | None = None,
        metadata: Metadata = (),
    ) -> RequestState:
        """Cancel a live request of the same tenant; where it stood. Raises RequestNotFound."""
        stub = pb.GenerationServiceStub(self._connect())
        request = pb.CancelRequest(request_id=request_id)
        response = self._unary(stub.Cancel, request, deadline_s, trace, metadata)
        return decode_state(response.state)

    def list_models(
        self, *, deadline_s: float | None = CONTROL_DEADLINE_S, metadata: Metadata = ()
    ) -> tuple[Model, ...]:
        """All models the caller may use, by name. `deadline_s` holds for each page."""
        stub = pb.ModelServiceStub(self._connect())
        models: list[Model] = []
        request = pb.ListModelsRequest()
        for _ in range(MAX_NUM_PAGES):
            page = self._unary(stub.ListModels, request, deadline_s, None, metadata)
            models.extend(decode_model(model) for model in page.models)
            if not page.next_page_token:
                return tuple(models)
            request = pb.ListModelsRequest(page_token=page.next_page_token)
        raise StreamBroken.because(f"the list of models did not end after {MAX_NUM_PAGES} pages")

    def get_model(
        self,
        name: str | None = None,
        *,
        deadline_s: float | None = CONTROL_DEADLINE_S,
        metadata: Metadata = (),
    ) -> Model:
        """Limits and features of one model; None: the default one."""
        stub = pb.ModelServiceStub(self._connect())
        request = pb.GetModelRequest(name=name)
        response = self._unary(stub.GetModel, request, deadline_s, None, metadata)
        return decode_model(response.model)

    def tokenize(
        self,
        prompt: PromptLike,
        *,
        model: str | None = None,
        deadline_s: float | None = CONTROL_DEADLINE_S,
        metadata: Metadata = (),
    ) -> Tokenization:
        """Token ids of a text or a dialogue, exactly as `generate` would use them."""
        stub = pb.ModelServiceStub(self._connect())
        request = pb.TokenizeRequest(model=model)
        encode_prompt(as_prompt(prompt), request)
        response = self._unary(stub.Tokenize, request, deadline_s, None, metadata)
        return Tokenization(
            token_ids=tuple(response.token_ids),
            rendered_text=response.rendered_text,
            num_dropped_messages=response.num_dropped_messages,
        )

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        skip_special_tokens: bool | None = None,
        deadline_s: float | None = CONTROL_DEADLINE_S,
        metadata: Metadata = (),
    ) -> str:
        """Text of token ids. `skip_special_tokens` None: as the server does, True."""
        stub = pb.ModelServiceStub(self._connect())
        request = pb.DetokenizeRequest(model=model, skip_special_tokens=skip_special_tokens)
        encode_ids(token_ids, request)
        response = self._unary(stub.Detokenize, request, deadline_s, None, metadata)
        return response.text

    def health(self, service: str = "", *, deadline_s: float = CONTROL_DEADLINE_S) -> HealthStatus:
        """What grpc.health.v1 says now, "" for the server as a whole. Never tried again."""
        method = self._connect().unary_unary(
            HEALTH_METHOD,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = method(request, timeout=deadline_s)
        except grpc.RpcError as failed:
            raise error_from_call(failed) from failed
        return decode_health(response.status)

    def wait_until_serving(self, service: str = "", *, deadline_s: float) -> None:
        """Return once the server says SERVING, also if it is not there yet.

        Raises DeadlineExceeded when that takes too long.
        """
        method = self._connect().unary_stream(
            HEALTH_WATCH_METHOD,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        request = health_pb2.HealthCheckRequest(service=service)
        call = method(request, timeout=deadline_s, wait_for_ready=True)
        try:
            for response in call:
                if decode_health(response.status) is HealthStatus.SERVING:
                    return
        except grpc.RpcError as failed:
            raise error_from_call(failed) from failed
        finally:
            call.cancel()
        raise Unavailable(
            Failure(code=grpc.StatusCode.UNAVAILABLE, message="the health watch ended")
        )

    def _stream(
        self,
        request: pb.GenerateRequest,
        attempts: Attempts,
        metadata: tuple[tuple[str, str], ...],
    ) -> Generator[Event, None, None]:
        while True:
            stub = pb.GenerationServiceStub(self._connect())
            reader = StreamReader()
            call = stub.Generate(request, timeout=attempts.timeout_s(), metadata=metadata)
            try:
                for response in call:
                    event = reader.receive(response)
                    if event is not None:
                        yield event
            except grpc.RpcError as failed:
                error = error_from_call(failed, request_id=reader.request_id)
                delay_s = attempts.delay_after(error, has_output=reader.has_output)
                if delay_s is None:
                    raise error from failed
            else:
                yield reader.end()
                return
            finally:
                call.cancel()
            self._sleep(delay_s)

    def _unary(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_RequestT, _ResponseT]",
        request: _RequestT,
        deadline_s: float | None,
        trace: TraceContext | None,
        metadata: Metadata,
    ) -> _ResponseT:
        attempts = self._settings.attempts(deadline_s)
        pairs = self._settings.call_metadata(metadata, trace)
        while True:
            self._connect()
            try:
                return method(request, timeout=attempts.timeout_s(), metadata=pairs)
            except grpc.RpcError as failed:
                error = error_from_call(failed)
                delay_s = attempts.delay_after(error)
                if delay_s is None:
                    raise error from failed
            self._sleep(delay_s)

    def _connect(self) -> grpc.Channel:
        if self._is_closed:
            raise RuntimeError("the client is closed")
        return self._channel


def _texts(events: Generator[Event, None, None]) -> Generator[str, None, None]:
    try:
        for event in events:
            if isinstance(event, Tokens) and event.text:
                yield event.text
    finally:
        events.close()
