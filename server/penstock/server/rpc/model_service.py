"""Implements penstock.v1.ModelService: describes the served model and calls its tokenizer.

Contains the handlers of ListModels, GetModel, Tokenize and Detokenize, the published limits and
features, and methods for features that are not implemented. These methods return UNIMPLEMENTED with
the name of the feature. Features that are not implemented are published as false, and are rejected
here or in `mapping_in.prompt`; a test checks that published and rejected features agree. Features
of the executor are published when an engine has connected.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from penstock.conventions import MAX_PAGE_SIZE
from penstock.scheduler.executor import Feature
from penstock.server.front.errors import ErrorReason, request_error, unsupported_feature
from penstock.server.front.front import Front
from penstock.server.front.generation import ChatInput, LongTokenInput, TextInput, TokenInput
from penstock.server.front.limits import Limits
from penstock.server.front.prompt_tokens import EncodedPrompt
from penstock.server.rpc import service_names
from penstock.server.rpc.handlers import Context, HandlerWrapper, UnaryHandler
from penstock.server.rpc.mapping_in.generation import MAX_ID_CHARS, check_model
from penstock.server.rpc.mapping_in.prompt import (
    CHAT_PATH,
    TEXT_PATH,
    read_chat,
    read_text,
    token_input,
)
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.rpc.mapping_out import duration_of
from penstock.server.rpc.options import (
    MAX_CONCURRENT_STREAMS,
    MAX_MESSAGE_BYTES,
    MAX_METADATA_BYTES,
    KeepaliveConfig,
)
from penstock.server.rpc.parsing import parse
from penstock.server.security.rights import Caller
from penstock.v1 import model_pb2
from penstock.v1 import model_service_pb2 as pb

T = TypeVar("T")
_TOKENS_AT_ONCE = 4096
"""Number of tokens that are added to a message at a time, in about a third of a millisecond."""
UNIMPLEMENTED_METHODS: Final[Mapping[str, str]] = {
    "LoadModel": "model_loading",
    "UnloadModel": "model_loading",
    "WatchModels": "model_loading",
    "SetModelAlias": "model_loading",
    "LoadAdapter": "adapter_loading",
    "UnloadAdapter": "adapter_loading",
    "ListAdapters": "adapter_loading",
}
"""Unimplemented method -> feature, a field of ModelFeatures."""
_STREAMS: Final = frozenset({"LoadModel", "WatchModels"})


class ModelService:
    """The handlers of ModelService, for one gRPC server process. They raise RequestError if a
    request is rejected.

    `has_operations` is True if the service has an OperationsService, on a separate port.
    """

    def __init__(
        self, front: Front, keepalive: KeepaliveConfig, *, has_operations: bool = False
    ) -> None:
        self._front = front
        self._keepalive = keepalive
        self._has_operations = has_operations

    def handlers(self, wrapper: HandlerWrapper) -> "grpc.GenericRpcHandler":
        """Return the gRPC handlers of all methods of the service, created with `wrapper`."""
        handlers: dict[str, UnaryHandler] = {
            "ListModels": self.list_models,
            "GetModel": self.get_model,
        }
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            **{name: wrapper.unary(name, handler) for name, handler in handlers.items()},
            "Tokenize": wrapper.unary_with_caller("Tokenize", self.tokenize),
            "Detokenize": wrapper.unary_with_caller("Detokenize", self.detokenize),
            **{
                name: _unimplemented_handler(name, feature, wrapper)
                for name, feature in UNIMPLEMENTED_METHODS.items()
            },
        }
        return grpc.method_handlers_generic_handler(service_names.MODEL, methods)

    async def list_models(self, data: bytes, context: Context) -> bytes:
        """Return the list of models as a single page with one model."""
        del context
        request = parse(pb.ListModelsRequest, data)
        violations = Violations()
        if request.HasField("page_size"):
            violations.integer("page_size", request.page_size, 1, MAX_PAGE_SIZE)
        if request.page_token:
            violations.add("page_token", "is not a token of this server")
        violations.raise_if_any()
        return pb.ListModelsResponse(models=[self._model()]).SerializeToString()

    async def get_model(self, data: bytes, context: Context) -> bytes:
        """Return the state, limits and features of a model."""
        del context
        request = parse(pb.GetModelRequest, data)
        check_model(request.name if request.HasField("name") else None, self._front.model_names)
        return pb.GetModelResponse(model=self._model()).SerializeToString()

    async def tokenize(self, data: bytes, context: Context, caller: Caller) -> bytes:
        """Convert a text or a chat to token ids, as Generate does."""
        del context
        tenant = caller.tenant
        request = parse(pb.TokenizeRequest, data)
        check_model(request.model if request.HasField("model") else None, self._front.model_names)
        limits = self._limits()
        violations = Violations()
        prompt: TextInput | ChatInput | None = None
        path = TEXT_PATH
        match request.WhichOneof("prompt"):
            case "text_prompt":
                prompt = read_text(request.text_prompt, limits, violations)
            case "chat_prompt":
                prompt, path = read_chat(request.chat_prompt, limits, violations), CHAT_PATH
            case _:
                violations.add("prompt", "one of text_prompt and chat_prompt is required")
        violations.raise_if_any()
        assert prompt is not None
        encoded = await self._front.prompts.encode(prompt, path, limits, tenant=tenant)
        answer = functools.partial(_tokens_as_bytes, encoded, is_chat=isinstance(prompt, ChatInput))
        return await self._run_task(answer, len(encoded.ids), tenant)

    async def detokenize(self, data: bytes, context: Context, caller: Caller) -> bytes:
        """Convert token ids to text."""
        del context
        tenant = caller.tenant
        request = parse(pb.DetokenizeRequest, data)
        check_model(request.model if request.HasField("model") else None, self._front.model_names)
        limits = self._limits()
        violations = Violations()
        ids: TokenInput | LongTokenInput = TokenInput(ids=())
        if violations.count("token_ids", len(request.token_ids), limits.max_total_tokens):
            ids = token_input(request.token_ids, "token_ids", limits, violations)
        violations.raise_if_any()
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._front.prompts.detokenize(ids, tenant=tenant, skip_special_tokens=skip)
        return await self._run_task(functools.partial(_text_as_bytes, text), ids.num_tokens, tenant)

    async def _run_task(self, task: Callable[[], T], num_tokens: int, tenant: str) -> T:
        """Run a task for `num_tokens` tokens and return its result. Uses a thread for more than
        `_TOKENS_AT_ONCE` tokens."""
        if num_tokens <= _TOKENS_AT_ONCE:
            return task()
        return await self._front.prompts.on_thread(task, num_tokens=num_tokens, tenant=tenant)

    def _model(self) -> model_pb2.ModelInfo:
        return model_of(self._front, self._keepalive, has_operations=self._has_operations)

    def _limits(self) -> Limits:
        """Return the limits of the last connected engine, even if it is lost, because the tokenizer
        works without an engine.

        Raises RequestError (MODEL_NOT_READY) before the first engine has connected.
        """
        limits = self._front.limits
        if limits is None:
            raise request_error(
                ErrorReason.MODEL_NOT_READY, model=self._front.model, state="MODEL_STATE_LOADING"
            )
        return limits


def _tokens_as_bytes(encoded: EncodedPrompt, *, is_chat: bool) -> bytes:
    """Return the response of Tokenize.

    Token ids are added in parts, because adding a part holds the GIL.
    """
    response = pb.TokenizeResponse(
        rendered_text=encoded.text if is_chat else "",
        num_dropped_messages=encoded.num_dropped_messages,
    )
    for start in range(0, len(encoded.ids), _TOKENS_AT_ONCE):
        response.token_ids.extend(encoded.ids[start : start + _TOKENS_AT_ONCE].tolist())
    return response.SerializeToString()


def _text_as_bytes(text: str) -> bytes:
    return pb.DetokenizeResponse(text=text).SerializeToString()


def _unimplemented_handler(
    method: str, feature: str, wrapper: HandlerWrapper
) -> "grpc.RpcMethodHandler[Any, Any]":
    async def reject_unary(data: bytes, context: Context) -> bytes:
        del data, context
        raise unsupported_feature(feature)

    async def reject_stream(data: bytes, context: Context, caller: Caller) -> None:
        del data, context, caller
        raise unsupported_feature(feature)

    if method in _STREAMS:
        return wrapper.stream_with_caller(method, reject_stream)
    return wrapper.unary(method, reject_unary)


def model_of(
    front: Front, keepalive: KeepaliveConfig, *, has_operations: bool = False
) -> model_pb2.ModelInfo:
    """Return the ModelInfo of the one model that a gRPC server process serves. `has_operations` is
    True if the service has an OperationsService, on a separate port."""
    return model_pb2.ModelInfo(
        name=front.model,
        aliases=front.config.model_aliases,
        is_default=True,
        state=_state_of(front),
        limits=_limits_of(front, keepalive),
        features=_features_of(front, has_operations=has_operations),
        adapters=front.limits.adapters if front.limits is not None else (),
        executor=front.hello.executor.name if front.hello else "",
        ready_time=_time_of(front.ready_time_s),
        quantization=front.hello.executor.quantization if front.hello else "",
        kv_cache_dtype=front.hello.executor.kv_cache_dtype if front.hello else "",
    )


def _state_of(front: Front) -> model_pb2.ModelState.ValueType:
    if front.is_draining:
        return model_pb2.MODEL_STATE_DRAINING
    if front.is_engine_up:
        return model_pb2.MODEL_STATE_READY
    if front.hello is None:
        return model_pb2.MODEL_STATE_LOADING
    return model_pb2.MODEL_STATE_RECOVERING


def _time_of(time_s: float | None) -> Timestamp | None:
    if time_s is None:
        return None
    time = Timestamp()
    time.FromMilliseconds(round(time_s * 1000))
    return time


def _limits_of(front: Front, keepalive: KeepaliveConfig) -> model_pb2.ModelLimits:
    config = front.config
    limits = model_pb2.ModelLimits(
        max_prompt_bytes=config.max_prompt_bytes,
        max_chat_messages=config.max_chat_messages,
        max_stop_strings=config.max_stop_strings,
        max_stop_string_chars=config.max_stop_string_chars,
        max_stop_string_bytes=config.max_stop_string_bytes,
        max_stop_token_ids=config.max_stop_token_ids,
        max_num_outputs=config.max_num_outputs,
        max_logprobs=config.max_logprobs,
        max_logit_bias=config.max_logit_bias,
        max_identifier_chars=MAX_ID_CHARS,
        max_images=0,
        max_image_bytes=0,
        max_message_bytes=MAX_MESSAGE_BYTES,
        max_metadata_bytes=MAX_METADATA_BYTES,
        max_concurrent_streams=MAX_CONCURRENT_STREAMS,
        max_resume_timeout=duration_of(config.max_resume_timeout_s),
        reader_stall_timeout=duration_of(config.max_reader_stall_s),
        default_timeout=duration_of(config.default_deadline_s),
        max_timeout=duration_of(config.max_deadline_s),
        keepalive=model_pb2.KeepalivePolicy(
            min_client_ping_interval=duration_of(keepalive.min_client_ping_interval_s),
            server_ping_interval=duration_of(keepalive.server_ping_interval_s),
            server_ping_timeout=duration_of(keepalive.server_ping_timeout_s),
            max_connection_age=duration_of(keepalive.max_connection_age_s),
            max_connection_age_grace=duration_of(keepalive.max_connection_age_grace_s),
        ),
    )
    if front.limits is not None and front.hello is not None:
        _add_engine_limits(limits, front.limits)
        limits.max_pending_requests = front.hello.max_num_waiting
        limits.max_pending_tokens = min(front.hello.max_num_waiting_tokens, 2**32 - 1)
    return limits


def _add_engine_limits(message: model_pb2.ModelLimits, limits: Limits) -> None:
    message.max_prompt_tokens = limits.max_prompt_tokens
    message.max_output_tokens = limits.max_output_tokens
    message.max_total_tokens = limits.max_total_tokens
    message.default_max_tokens = limits.default_max_tokens
    message.vocab_size = limits.vocab_size
    message.max_chunk_tokens = limits.max_chunk_tokens
    message.max_constraint_bytes = limits.max_constraint_bytes


def _features_of(front: Front, *, has_operations: bool) -> model_pb2.ModelFeatures:
    features = model_pb2.ModelFeatures(
        text_prompt=True,
        token_prompt=True,
        chat_prompt=front.text.tokenizer.has_chat_template,
        truncated_sampling=True,
        multiple_outputs=True,
        echo=True,
        priority=True,
        timeouts=True,
        time_limit=True,
        cache_salt=True,
        images=False,
        chunk_limits=True,
        multiplex=True,
        resume=front.config.max_resume_timeout_s > 0,
        model_loading=False,
        tools=front.text.tokenizer.has_tools,
        adapter_loading=False,
        flight_record=has_operations,
        request_listing=has_operations,
        stats=has_operations,
        drain=has_operations,
    )
    if front.limits is not None:
        features.sessions = front.limits.has_sessions
        for feature in Feature:  # with the contract's names
            setattr(features, feature.value, feature in front.limits.features)
    return features
