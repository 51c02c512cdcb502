"""The calls of a client other than generation: models, tokens and health.

Builds their requests and converts their responses; `calls.py` makes the calls.
"""

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2

import penstock.v1 as pb
from penstock.client.call_settings import (
    CONTROL_DEADLINE_S,
    HEALTH_METHOD,
    HEALTH_WATCH_METHOD,
    MAX_NUM_PAGES,
    Metadata,
)
from penstock.client.calls import Calls, RequestT, ResponseT, UnaryMethod
from penstock.client.decoding import decode_health, decode_model
from penstock.client.encoding import encode_ids, encode_prompt, filled
from penstock.client.errors import Failure, StreamBroken, Unavailable
from penstock.client.model_info import HealthStatus, Model, Tokenization
from penstock.client.prompt import PromptLike, as_prompt
from penstock.client.status import error_from_call


class ModelCalls:
    """The methods of `Client` for models, tokens and health, and `close`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __repr__(self) -> str:
        return f"Client({self._calls.pool.addresses!r})"

    async def close(self, *, drain_timeout_s: float = 0.0) -> None:
        """Accept no more calls, wait up to `drain_timeout_s` seconds for open generations, then
        cancel all open calls and disconnect.

        Generations that wait for admission end immediately with CallCancelled. May be called twice.
        """
        await self._calls.close(drain_timeout_s)

    async def list_models(
        self, *, deadline_s: float | None = CONTROL_DEADLINE_S, metadata: Metadata = ()
    ) -> tuple[Model, ...]:
        """Return all models that the caller may use, sorted by name. `deadline_s` applies to each
        page."""
        models: list[Model] = []
        request = pb.ListModelsRequest()
        for _ in range(MAX_NUM_PAGES):
            page = await self._call(
                lambda channel: pb.ModelServiceStub(channel).ListModels,
                request,
                deadline_s,
                metadata,
            )
            models.extend(decode_model(model) for model in page.models)
            if not page.next_page_token:
                return tuple(models)
            request = pb.ListModelsRequest(page_token=page.next_page_token)
        raise StreamBroken.with_message(
            f"the list of models did not end after {MAX_NUM_PAGES} pages"
        )

    async def get_model(
        self,
        name: str | None = None,
        *,
        deadline_s: float | None = CONTROL_DEADLINE_S,
        metadata: Metadata = (),
    ) -> Model:
        """Return one model, with its limits and features; the default model if `name` is None.

        Raises `ModelNotFound`.
        """
        request = filled(pb.GetModelRequest(), name=name)
        response = await self._call(
            lambda channel: pb.ModelServiceStub(channel).GetModel, request, deadline_s, metadata
        )
        return decode_model(response.model)

    async def tokenize(
        self,
        prompt: PromptLike,
        *,
        model: str | None = None,
        deadline_s: float | None = CONTROL_DEADLINE_S,
        metadata: Metadata = (),
    ) -> Tokenization:
        """Return the tokens of a text or a conversation, exactly as `generate` uses them. Raises
        ValueError for token ids."""
        request = filled(pb.TokenizeRequest(), model=model)
        encode_prompt(as_prompt(prompt), request)
        response = await self._call(
            lambda channel: pb.ModelServiceStub(channel).Tokenize, request, deadline_s, metadata
        )
        return Tokenization(
            token_ids=tuple(response.token_ids),
            rendered_text=response.rendered_text,
            num_dropped_messages=response.num_dropped_messages,
        )

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        skip_special_tokens: bool | None = None,
        deadline_s: float | None = CONTROL_DEADLINE_S,
        metadata: Metadata = (),
    ) -> str:
        """Return the text of token ids.

        `skip_special_tokens` None: the server's default, True.
        """
        request = filled(
            pb.DetokenizeRequest(), model=model, skip_special_tokens=skip_special_tokens
        )
        encode_ids(token_ids, request)
        response = await self._call(
            lambda channel: pb.ModelServiceStub(channel).Detokenize, request, deadline_s, metadata
        )
        return response.text

    async def health(
        self, service: str = "", *, deadline_s: float = CONTROL_DEADLINE_S
    ) -> HealthStatus:
        """Return the state that grpc.health.v1 reports for a service; "" means the whole server.

        This call is never retried. Raises `NotFound` for an unknown service.
        """
        request = filled(health_pb2.HealthCheckRequest(), service=service)
        async with self._calls.borrowed_channel() as channel:
            method = channel.unary_unary(
                HEALTH_METHOD,
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            try:
                response = await method(request, timeout=deadline_s)
            except grpc.RpcError as failed:
                raise error_from_call(failed, address=self._calls.pool.addresses) from failed
        return decode_health(response.status)

    async def wait_until_serving(self, service: str = "", *, deadline_s: float) -> None:
        """Wait until the server reports SERVING; the server may still be starting.

        Raises `DeadlineExceeded` after `deadline_s` seconds, and `Unavailable` if the connection is
        lost or the server ends the call while it waits.
        """
        request = filled(health_pb2.HealthCheckRequest(), service=service)
        async with self._calls.borrowed_channel() as channel:
            method = channel.unary_stream(
                HEALTH_WATCH_METHOD,
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            call = method(request, timeout=deadline_s, wait_for_ready=True)
            try:
                async for response in call:
                    if decode_health(response.status) is HealthStatus.SERVING:
                        return
            except grpc.RpcError as failed:
                raise error_from_call(failed, address=self._calls.pool.addresses) from failed
            finally:
                call.cancel()
        raise Unavailable(
            Failure(code=grpc.StatusCode.UNAVAILABLE, message="the health watch ended")
        )

    async def _call(
        self,
        method: "UnaryMethod[RequestT, ResponseT]",
        request: RequestT,
        deadline_s: float | None,
        metadata: Metadata,
    ) -> ResponseT:
        settings = self._calls.settings
        pairs = settings.call_metadata(metadata, None)
        return await self._calls.unary(method, request, settings.attempts(deadline_s), pairs)
