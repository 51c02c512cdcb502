"""Serves VllmEngine, the protocol between the smg gateway and its workers, in one front (gRPC
server process).

A request is converted to a Penstock request and treated like any other, with the same limits,
queue, quotas, deadlines and traces. No other layer depends on the gateway's protocol.

Error messages name the gateway's fields, because a caller that sent `sampling_params.stop` has no
field `stopping.stop_strings`. A table maps Penstock's field paths to the gateway's field paths.
"""

import asyncio
import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from penstock.gateway.smg.kv_events import KvEvents
from penstock.gateway.smg.loads import LoadReport
from penstock.gateway.smg.request_mapping import penstock_request
from penstock.gateway.smg.response_mapping import ChunkEncoder, NonStreamingEncoder
from penstock.gateway.smg.worker_info import (
    CHUNK_BYTES,
    SERVER_TYPE,
    TokenizerBundle,
    load_of,
    make_bundle,
    model_info_of,
    server_info_of,
)
from penstock.server.front.accounts import RequestAccount
from penstock.server.front.errors import (
    ErrorReason,
    Failure,
    FieldViolation,
    RequestError,
    invalid_field,
    request_error,
    unsupported_feature,
)
from penstock.server.front.front import Front
from penstock.server.ipc.board import BoardView
from penstock.server.ipc.frames import EngineHello
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.generation_call import begin_call, deliver, open_request
from penstock.server.rpc.handlers import CallAccounts, Context, HandlerWrapper
from penstock.server.rpc.mapping_in.generation import check_request_id
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.rpc.parsing import num_unknown_fields, parse
from penstock.server.security.rights import Caller, Right

SERVICE_NAME: Final = "vllm.grpc.engine.VllmEngine"
MISSING_METHODS: Final = {
    "Embed": "embeddings",
    "FlushCache": "cache_flush",
    "StartProfile": "profiles_by_gateway",
    "StopProfile": "profiles_by_gateway",
}
"""Methods that are rejected, with the feature that they would require."""
_RIGHTS: Final[Mapping[str, Right | None]] = {
    "Generate": Right.GENERATE,
    "Embed": Right.GENERATE,
    "SubscribeKvEvents": Right.GENERATE,
    "Abort": Right.CANCEL,
    "FlushCache": Right.OPERATIONS_WRITE,
    "GetLoads": Right.OPERATIONS_READ,
    "GetModelInfo": Right.MODELS,
    "GetServerInfo": Right.MODELS,
    "GetTokenizer": Right.MODELS,
    "HealthCheck": None,  # A probe, like grpc.health.v1.
    "StartProfile": Right.OPERATIONS_WRITE,
    "StopProfile": Right.OPERATIONS_WRITE,
}
_MAX_ABORTS: Final = 1024
PATHS: Final[Mapping[str, str]] = {
    "prompt": "input",
    "text_prompt.text": "text",
    "token_prompt.ids": "tokenized.input_ids",
    "sampling": "sampling_params",
    "stopping.max_tokens": "sampling_params.max_tokens",
    "stopping.min_tokens": "sampling_params.min_tokens",
    "stopping.stop_strings": "sampling_params.stop",
    "stopping.stop_token_ids": "sampling_params.stop_token_ids",
    "stopping.ignore_eos": "sampling_params.ignore_eos",
    "stopping.include_stop_string": "sampling_params.include_stop_str_in_output",
    "output.logprobs": "sampling_params.logprobs",
    "output.prompt_logprobs": "sampling_params.prompt_logprobs",
    "constraint.json_schema.schema": "sampling_params.json_schema",
    "constraint.regex.pattern": "sampling_params.regex",
    "constraint.grammar.ebnf": "sampling_params.grammar",
    "constraint": "sampling_params",
}
"""Maps Penstock's field paths to those of the gateway. If a path is not a key, its longest prefix
(of whole names) that is a key is replaced."""
_BIAS: Final = re.compile(r"sampling\.logit_bias\[(\d+)\]\.(token_id|bias)")
_ENTRY: Final = {"token_id": "key", "bias": "value"}
"""Maps the field names of Penstock's logit bias to those of the gateway, which has a map of biases
instead of a list."""


class VllmEngineService:
    """The handlers of VllmEngine, for one front process.

    `board` reads the engine's status board; None if the engine publishes no load. `wall_clock`
    returns seconds since 1970.
    """

    name = SERVICE_NAME
    rights: Mapping[str, Right | None] = {
        f"/{SERVICE_NAME}/{method}": right for method, right in _RIGHTS.items()
    }

    def __init__(
        self,
        front: Front,
        access: AccessControl,
        board: BoardView | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._front = front
        self._accounts = CallAccounts(front, SERVICE_NAME)
        self._loads = LoadReport(board, front.clock)
        self._wall_clock = wall_clock
        self._kv_events = KvEvents(front, access, wall_clock)
        self._started_s = front.clock()
        self._bundle: asyncio.Task[TokenizerBundle] | None = None

    def handlers(self, wrapper: HandlerWrapper) -> "grpc.GenericRpcHandler":
        """Return the handlers of all methods."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": wrapper.stream_request("Generate", self.generate, self._accounts),
            "Abort": wrapper.unary_with_caller("Abort", self.abort),
            "HealthCheck": wrapper.unary("HealthCheck", self.health_check),
            "GetModelInfo": wrapper.unary("GetModelInfo", self.model_info),
            "GetServerInfo": wrapper.unary("GetServerInfo", self.server_info),
            "GetLoads": wrapper.unary("GetLoads", self.loads),
            "GetTokenizer": wrapper.server_stream("GetTokenizer", self.tokenizer),
            "SubscribeKvEvents": wrapper.stream_with_caller(
                "SubscribeKvEvents", self._kv_events.subscribe
            ),
        }
        for method, feature in MISSING_METHODS.items():
            methods[method] = wrapper.unary(method, _rejecting(feature))
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    async def generate(self, data: bytes, context: Context, account: RequestAccount) -> None:
        """Serve one request, as a stream of chunks or with one message per output. Raises
        RequestError; it names the gateway's fields."""
        times = begin_call(context, account)
        message = parse(vllm.GenerateRequest, data)
        del data
        request = None
        bias_ids: Sequence[int] = ()
        try:
            own = penstock_request(message)
            bias_ids = [entry.token_id for entry in own.sampling.logit_bias]
            self._accounts.describe(account, own, is_stream=message.stream)
            self._front.counters.num_unknown_fields += num_unknown_fields(message)
            encoder = ChunkEncoder() if message.stream else NonStreamingEncoder()
            del message
            request = await open_request(self._front, own, times, account)
            del own
            await deliver(self._front, request, encoder, context)
            if encoder.usage is not None:
                self._loads.record_usage(encoder.usage)
        except RequestError as error:
            raise RequestError(with_gateway_paths(error.failure, bias_ids)) from None
        finally:
            if request is not None:
                self._front.release(request)

    async def abort(self, data: bytes, context: Context, caller: Caller) -> bytes:
        """Cancel live requests of the caller's tenant. Unknown and ended requests are ignored.
        Raises RequestError for too many or invalid ids."""
        del context
        message = parse(vllm.AbortRequest, data)
        violations = Violations()
        if violations.count("request_ids", len(message.request_ids), _MAX_ABORTS):
            for index, request_id in enumerate(message.request_ids):
                check_request_id(f"request_ids[{index}]", request_id, violations)
        violations.raise_if_any()
        for request_id in dict.fromkeys(message.request_ids):
            try:
                await self._front.cancel(request_id, caller.tenant)
            except RequestError as error:
                if error.reason is not ErrorReason.REQUEST_NOT_FOUND:
                    raise
        return vllm.AbortResponse().SerializeToString()

    async def health_check(self, data: bytes, context: Context) -> bytes:
        """Return a response if requests are accepted, otherwise raise RequestError, because
        gateways regard a worker that returns any response as healthy."""
        del context
        parse(vllm.HealthCheckRequest, data)
        self._hello()
        return vllm.HealthCheckResponse(healthy=True, message="serving").SerializeToString()

    async def model_info(self, data: bytes, context: Context) -> bytes:
        """Return the name, token limits and special token ids of the model, for routing. Raises
        RequestError while requests are rejected."""
        del context
        parse(vllm.GetModelInfoRequest, data)
        self._hello()
        info = model_info_of(self._front.text.files, self._front.current_limits())
        return info.SerializeToString()

    async def server_info(self, data: bytes, context: Context) -> bytes:
        """Return the uptime of this front process, and the engine's block size and number of slots.
        Raises RequestError while requests are rejected."""
        del context
        parse(vllm.GetServerInfoRequest, data)
        uptime_s = self._front.clock() - self._started_s
        return server_info_of(self._hello().executor, uptime_s).SerializeToString()

    async def loads(self, data: bytes, context: Context) -> bytes:
        """Return the load of the engine, including the requests of all callers. Raises RequestError
        for a rank other than 0, and while requests are rejected."""
        del context
        message = parse(vllm.GetLoadsRequest, data)
        if message.dp_rank != 0:
            raise invalid_field("dp_rank", "must be 0 or unset: there is one rank")
        response = vllm.GetLoadsResponse(
            timestamp=datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(),
            version=SERVER_TYPE,
            dp_rank_count=1,
        )
        info = self._hello().executor
        response.loads.append(load_of(self._loads.load(info)))
        return response.SerializeToString()

    async def tokenizer(self, data: bytes, context: Context) -> None:
        """Send the files of the tokenizer as an archive, in parts; the last part has the archive's
        SHA-256. Raises RequestError if it is too large, and OSError if a file cannot be read."""
        parse(common_pb2.GetTokenizerRequest, data)
        if self._bundle is None or (self._bundle.done() and self._bundle.exception() is not None):
            folder = self._front.text.files.path
            self._bundle = asyncio.create_task(asyncio.to_thread(make_bundle, folder))
        # The task is shared, so a caller that disconnects must not cancel it for others.
        bundle = await asyncio.shield(self._bundle)
        for start in range(0, len(bundle.data), CHUNK_BYTES):
            chunk = common_pb2.GetTokenizerChunk(data=bundle.data[start : start + CHUNK_BYTES])
            if start + CHUNK_BYTES >= len(bundle.data):
                chunk.sha256 = bundle.sha256
            await context.write(chunk.SerializeToString())

    def _hello(self) -> EngineHello:
        """Return the properties of the current engine, from the first frame that it sent. Raises
        RequestError while requests are rejected."""
        self._front.current_limits()
        hello = self._front.hello
        if hello is None:
            raise request_error(ErrorReason.ENGINE_DOWN)
        return hello


def _rejecting(feature: str) -> Callable[[bytes, Context], Any]:
    async def reject_call(data: bytes, context: Context) -> bytes:
        del data, context
        raise unsupported_feature(feature)

    return reject_call


def with_gateway_paths(failure: Failure, bias_ids: Sequence[int] = ()) -> Failure:
    """Return the same failure with the gateway's field names.

    `bias_ids` has the token ids of `logit_bias`, in order.
    """
    violations = tuple(
        FieldViolation(
            path=gateway_path(violation.path, bias_ids), description=violation.description
        )
        for violation in failure.violations
    )
    metadata = failure.metadata
    if "field" in metadata:
        metadata = {**metadata, "field": gateway_path(metadata["field"], bias_ids)}
    return dataclasses.replace(failure, violations=violations, metadata=metadata)


def gateway_path(path: str, bias_ids: Sequence[int] = ()) -> str:
    """Return the gateway's path for the path of a field of Penstock, or the same path if the
    gateway has no such field. `bias_ids` has the token ids of `logit_bias`, in order."""
    entry = _BIAS.fullmatch(path)
    if entry is not None and int(entry[1]) < len(bias_ids):
        return f"sampling_params.logit_bias[{bias_ids[int(entry[1])]}].{_ENTRY[entry[2]]}"
    ours = path
    while ours not in PATHS:
        cut = max(ours.rfind("."), ours.rfind("["))
        if cut < 0:
            return path
        ours = ours[:cut]
    return PATHS[ours] + path[len(ours) :]
