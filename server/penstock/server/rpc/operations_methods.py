"""Implements the handlers of penstock.v1.OperationsService. They query the processes of the
service, and send commands to them, through `Operations`.

Checks requests, splits responses into messages, and implements pagination. A page token has the
sort key of the last entry of a page and a checksum of the list's filters. The next page continues
after that entry, even if entries were added or removed meanwhile; the token of a list with other
filters is rejected. `Operations` provides the content of responses, and `mapping_operations` and
`flight_files` convert it to messages.
"""

import asyncio
import base64
import contextlib
import json
import math
import zlib
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration

from penstock.conventions import DEFAULT_PROFILE_S, MAX_PAGE_SIZE
from penstock.server.front.errors import ErrorReason, Failure, invalid_field, request_error
from penstock.server.ipc.frames import MAX_PROFILE_S
from penstock.server.observe.operations.service import Operations
from penstock.server.observe.operations.snapshot import (
    OperationsError,
    RequestView,
    arrival_order,
)
from penstock.server.rpc import service_names
from penstock.server.rpc.flight_files import perfetto_file, steps_of_recording
from penstock.server.rpc.handlers import (
    Context,
    HandlerWrapper,
    OtherRequestFailed,
    StreamHandler,
    UnaryHandler,
)
from penstock.server.rpc.mapping_in.generation import check_model
from penstock.server.rpc.mapping_in.violations import Violations
from penstock.server.rpc.mapping_operations import live_request_of, state_of, stats_of
from penstock.server.rpc.parsing import parse
from penstock.v1 import operations_service_pb2 as pb
from penstock.v1 import state_pb2, stats_pb2

MIN_INTERVAL_S, DEFAULT_INTERVAL_S, MAX_INTERVAL_S = 0.1, 1.0, 3600.0
DEFAULT_PAGE_SIZE = 100
MAX_CHUNK_BYTES: Final = 256 << 10
MAX_FLIGHT_CONVERSIONS: Final = 2
"""Maximum number of flight records that are fetched and converted at the same time, because each
needs a core and much memory."""
MAX_FLIGHT_READERS: Final = 8
"""Maximum number of flight records sent at the same time, because each stays in memory until it is
read."""
MAX_FLIGHT_WRITE_S: Final = 10.0
"""How long a reader may leave one message of a flight record unread, in seconds."""
MAX_FLIGHT_READ_S: Final = 120.0
"""How long a reader may take for the whole record, in seconds."""
_LEVELS = {
    pb.LOG_LEVEL_DEBUG: "debug",
    pb.LOG_LEVEL_INFO: "info",
    pb.LOG_LEVEL_WARNING: "warning",
    pb.LOG_LEVEL_ERROR: "error",
}
_PROCESSES = {
    pb.SERVER_PROCESS_UNSPECIFIED: "engine",
    pb.SERVER_PROCESS_ENGINE: "engine",
    pb.SERVER_PROCESS_FRONT: "front",
    pb.SERVER_PROCESS_OBSERVER: "observer",
}
_LIVE_STATES = (state_pb2.REQUEST_STATE_PENDING, state_pb2.REQUEST_STATE_PROCESSING)
T = TypeVar("T")
SortKey = tuple[float, str, str]
"""The sort key of an entry: time, tenant and request id. It is unique."""
MAX_TOKEN_CHARS = 4096


class OperationsMethods:
    """The handlers of OperationsService. They raise RequestError or OtherRequestFailed if a request
    is rejected. WatchStats calls end with DRAINING when `stopping` is set, before the server
    stops."""

    def __init__(self, operations: Operations, stopping: asyncio.Event) -> None:
        self._operations = operations
        self._stopping = stopping
        self._flight_conversions = asyncio.Semaphore(MAX_FLIGHT_CONVERSIONS)
        self._num_flight_readers = 0

    def handlers(self, wrapper: HandlerWrapper) -> "grpc.GenericRpcHandler":
        """Return the gRPC handlers of all methods of the service, created with `wrapper`."""
        unary: dict[str, UnaryHandler] = {
            "GetStats": self.get_stats,
            "ListLiveRequests": self.list_requests,
            "GetLiveRequest": self.get_request,
            "Drain": self.drain,
            "DumpFlightRecord": self.dump_flight_record,
            "SetLogLevel": self.set_log_level,
        }
        streams: dict[str, StreamHandler] = {
            "WatchStats": self.watch_stats,
            "GetFlightRecord": self.get_flight_record,
            "Profile": self.profile,
        }
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            **{name: wrapper.unary(name, handler) for name, handler in unary.items()},
            **{name: wrapper.server_stream(name, handler) for name, handler in streams.items()},
        }
        return grpc.method_handlers_generic_handler(service_names.OPERATIONS, methods)

    async def get_stats(self, data: bytes, context: Context) -> bytes:
        """Return a snapshot of the statistics, of all models or of one model."""
        del context
        request = parse(pb.GetStatsRequest, data)
        model = self._model_of(request)
        stats = stats_of(self._operations.snapshot(), model)
        return pb.GetStatsResponse(stats=stats).SerializeToString()

    async def watch_stats(self, data: bytes, context: Context) -> None:
        """Send snapshots of the statistics until the caller disconnects. Raises RequestError
        (DRAINING) when the server stops."""
        request = parse(pb.WatchStatsRequest, data)
        violations = Violations()
        interval_s = DEFAULT_INTERVAL_S
        if request.HasField("interval"):
            interval_s = violations.duration_s("interval", request.interval, MAX_INTERVAL_S)
            if interval_s < MIN_INTERVAL_S:
                violations.add("interval", f"must be at least {MIN_INTERVAL_S:g} seconds")
        violations.raise_if_any()
        model = self._model_of(request)
        while not self._stopping.is_set():
            stats = stats_of(self._operations.snapshot(), model)
            await context.write(pb.WatchStatsResponse(stats=stats).SerializeToString())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), interval_s)
        raise request_error(ErrorReason.DRAINING)

    async def list_requests(self, data: bytes, context: Context) -> bytes:
        """Return one page of the live requests that match the filters."""
        del context
        request = parse(pb.ListLiveRequestsRequest, data)
        violations = Violations()
        size = DEFAULT_PAGE_SIZE
        if request.HasField("page_size"):
            size = violations.integer("page_size", request.page_size, 1, MAX_PAGE_SIZE)
        if request.HasField("state") and request.state not in _LIVE_STATES:
            violations.add("state", "must be PENDING or PROCESSING: other requests have ended")
        violations.raise_if_any()
        self._model_of(request)
        found = [view for view in await self._live_requests() if _matches(view, request)]
        filters = pb.ListLiveRequestsRequest()
        filters.CopyFrom(request)
        filters.ClearField("page_size")
        filters.ClearField("page_token")
        try:
            page = page_of(
                found,
                arrival_order,
                size=size,
                token=request.page_token,
                filters=filters.SerializeToString(deterministic=True),
            )
        except BadPageToken:
            raise invalid_field("page_token", "is not a token of this list") from None
        return pb.ListLiveRequestsResponse(
            requests=[live_request_of(view) for view in page.entries],
            next_page_token=page.next_token,
        ).SerializeToString()

    async def get_request(self, data: bytes, context: Context) -> bytes:
        """Return one live request, found by its id. Raises OtherRequestFailed if there is none, and
        RequestError if the id is empty, or if several tenants use it and the call names no tenant.
        """
        del context
        request = parse(pb.GetLiveRequestRequest, data)
        if not request.request_id:
            raise invalid_field("request_id", "is required")
        tenant = request.tenant if request.HasField("tenant") else None
        found = [
            view
            for view in await self._live_requests()
            if view.request_id == request.request_id and tenant in (None, view.tenant)
        ]
        if not found:
            failure = Failure(reason=ErrorReason.REQUEST_NOT_FOUND)
            raise OtherRequestFailed(failure, request.request_id)
        if len({view.tenant for view in found}) > 1:
            raise invalid_field("tenant", "is required: several tenants use this request id")
        return pb.GetLiveRequestResponse(request=live_request_of(found[0])).SerializeToString()

    async def drain(self, data: bytes, context: Context) -> bytes:
        """Start draining the server, and return the number of live requests."""
        del context
        request = parse(pb.DrainRequest, data)
        violations = Violations()
        timeout_s: float | None = None
        if request.HasField("drain_timeout"):
            timeout_s = violations.duration_s(
                "drain_timeout", request.drain_timeout, can_be_zero=True
            )
        violations.raise_if_any()
        with _converted_errors():
            num_live = await self._operations.drain(timeout_s)
        return pb.DrainResponse(num_live_requests=num_live).SerializeToString()

    async def get_flight_record(self, data: bytes, context: Context) -> None:
        """Stream the content of the flight recorder (the latest steps of the engine) as step
        records, a Perfetto trace or the raw file."""
        request = parse(pb.GetFlightRecordRequest, data)
        is_raw = request.format == pb.FLIGHT_RECORD_FORMAT_RAW
        max_steps = request.max_steps if request.HasField("max_steps") else None
        violations = Violations()
        if request.format not in pb.FlightRecordFormat.values():
            violations.add("format", "is not a known format")
        if max_steps == 0:
            violations.add("max_steps", "must be at least 1")
        elif max_steps is not None and is_raw:
            violations.add("max_steps", "cannot be combined with RAW, which is always complete")
        violations.raise_if_any()
        self._model_of(request)
        if self._num_flight_readers >= MAX_FLIGHT_READERS:
            why = f"{MAX_FLIGHT_READERS} flight records are being read; try again later"
            raise request_error(ErrorReason.NOT_POSSIBLE_NOW, why)
        self._num_flight_readers += 1
        try:
            # Released before the record is sent, because a slow reader must not block others.
            async with self._flight_conversions:
                responses = await self._flight_responses(request.format, max_steps)
            await _write_in_time(context, responses)
        finally:
            self._num_flight_readers -= 1

    async def _flight_responses(
        self, file_format: pb.FlightRecordFormat.ValueType, max_steps: int | None
    ) -> Iterator[pb.GetFlightRecordResponse]:
        """Return the content of the flight recorder as messages.

        Steps are converted on a thread, because thousands of them take long.
        """
        with _converted_errors():
            recording = await self._operations.flight_record()
        if file_format == pb.FLIGHT_RECORD_FORMAT_RAW:
            return _file_responses(recording)
        if file_format == pb.FLIGHT_RECORD_FORMAT_PERFETTO:
            file = await asyncio.to_thread(perfetto_file, recording, max_steps)
            return _file_responses(file)
        records = await asyncio.to_thread(steps_of_recording, recording, max_steps)
        return _step_responses(records)

    async def dump_flight_record(self, data: bytes, context: Context) -> bytes:
        """Write the content of the flight recorder to a file on the server, and return its path."""
        del context
        request = parse(pb.DumpFlightRecordRequest, data)
        self._model_of(request)
        with _converted_errors():
            path = await self._operations.dump_flight_record("operator")
        return pb.DumpFlightRecordResponse(path=str(path)).SerializeToString()

    async def set_log_level(self, data: bytes, context: Context) -> bytes:
        """Set the log level of all processes."""
        del context
        request = parse(pb.SetLogLevelRequest, data)
        level = _LEVELS.get(request.level)
        if level is None:
            names = ", ".join(name.upper() for name in _LEVELS.values())
            raise invalid_field("level", f"must be one of {names}")
        with _converted_errors():
            await self._operations.set_log_level(level)
        return pb.SetLogLevelResponse().SerializeToString()

    async def profile(self, data: bytes, context: Context) -> None:
        """Sample the stacks of a process, and stream the profile as a file."""
        request = parse(pb.ProfileRequest, data)
        process, duration_s = _profile_of(request)
        with _converted_errors():
            pieces = self._operations.profile(process, duration_s)
            async for chunk in _rechunked(pieces):
                await context.write(pb.ProfileResponse(file_chunk=chunk).SerializeToString())

    def _model_of(
        self,
        request: pb.GetStatsRequest
        | pb.WatchStatsRequest
        | pb.ListLiveRequestsRequest
        | pb.GetFlightRecordRequest
        | pb.DumpFlightRecordRequest,
    ) -> str | None:
        """Return the requested model, None for all models. Raises RequestError for an unknown
        model."""
        model = request.model if request.HasField("model") else None
        check_model(model, tuple(each.model for each in self._operations.snapshot().models))
        return model

    async def _live_requests(self) -> tuple[RequestView, ...]:
        with _converted_errors():
            return await self._operations.live_requests()


@contextlib.contextmanager
def _converted_errors() -> Generator[None]:
    """Convert OperationsError to RequestError (NOT_POSSIBLE_NOW) with the same message. The message
    is written for operators."""
    try:
        yield
    except OperationsError as error:
        raise request_error(ErrorReason.NOT_POSSIBLE_NOW, str(error)) from None


def _matches(view: RequestView, request: pb.ListLiveRequestsRequest) -> bool:
    return (
        (not request.HasField("model") or view.model == request.model)
        and (not request.HasField("tenant") or view.tenant == request.tenant)
        and (not request.HasField("state") or state_of(view.state) == request.state)
    )


def _profile_of(request: pb.ProfileRequest) -> tuple[str, float]:
    """Return the name of the process for `Operations`, and the duration in seconds. Raises
    RequestError if a field is invalid."""
    violations = Violations()
    process = _PROCESSES.get(request.process)
    if process is None:
        violations.add("process", "is not a known process")
    elif process == "front":
        if not request.HasField("front_index"):
            violations.add("front_index", "is required for a front")
        process = f"front {request.front_index}"
    elif request.HasField("front_index"):
        violations.add("front_index", "is allowed for FRONT only")
    duration = request.duration if request.HasField("duration") else _default_profile()
    duration_s = violations.duration_s("duration", duration, MAX_PROFILE_S)
    violations.raise_if_any()
    assert process is not None
    return process, duration_s


def _default_profile() -> Duration:
    duration = Duration()
    duration.FromSeconds(int(DEFAULT_PROFILE_S))
    return duration


async def _write_in_time(context: Context, responses: Iterable[pb.GetFlightRecordResponse]) -> None:
    """Write all responses. Raises RequestError (READER_STALLED) if the reader exceeds
    MAX_FLIGHT_WRITE_S for one response or MAX_FLIGHT_READ_S for all."""
    try:
        async with asyncio.timeout(MAX_FLIGHT_READ_S):
            for response in responses:
                async with asyncio.timeout(MAX_FLIGHT_WRITE_S):
                    await context.write(response.SerializeToString())
    except TimeoutError:
        raise request_error(ErrorReason.READER_STALLED) from None


def _file_responses(file: bytes) -> Iterator[pb.GetFlightRecordResponse]:
    for start in range(0, len(file), MAX_CHUNK_BYTES):
        yield pb.GetFlightRecordResponse(file_chunk=file[start : start + MAX_CHUNK_BYTES])


def _step_responses(
    records: Iterable[stats_pb2.StepRecord],
) -> Iterator[pb.GetFlightRecordResponse]:
    """Yield the records in messages. Each message is filled up to MAX_CHUNK_BYTES, and has at least
    one step."""
    response, size = pb.GetFlightRecordResponse(), 0
    for record in records:
        num_bytes = record.ByteSize()
        if size and size + num_bytes > MAX_CHUNK_BYTES:
            yield response
            response, size = pb.GetFlightRecordResponse(), 0
        response.steps.steps.append(record)
        size += num_bytes
    if size:
        yield response


async def _rechunked(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for piece in pieces:
        for start in range(0, len(piece), MAX_CHUNK_BYTES):
            yield piece[start : start + MAX_CHUNK_BYTES]


class BadPageToken(ValueError):
    """The text is not a page token of this list."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list. `next_token` is empty on the last page."""

    entries: tuple[T, ...]
    next_token: str


def page_of(
    entries: Sequence[T],
    key_of: Callable[[T], SortKey],
    *,
    size: int,
    token: str,
    filters: bytes,
) -> Page[T]:
    """Return a page of at most `size` entries of the sorted `entries`. It follows the page with
    `next_token` equal to `token`, or is the first page if `token` is empty.

    `key_of` returns the sort key of an entry. `filters` are the encoded filters of the list. Raises
    BadPageToken if `token` is not a page token of a list with these filters.
    """
    digest = zlib.crc32(filters)
    if token:
        entries = _after(_decode(token, digest), entries, key_of)
    page = tuple(entries[:size])
    is_last = len(entries) <= size
    return Page(page, "" if is_last else _encode(key_of(page[-1]), digest))


def _after(key: SortKey, entries: Sequence[T], key_of: Callable[[T], SortKey]) -> Sequence[T]:
    """Return the entries after the entry at `key`.

    If that entry still exists, it is found by tenant and id, because times change when the clock is
    set.
    """
    for index, entry in enumerate(entries):
        if key_of(entry)[1:] == key[1:]:
            return entries[index + 1 :]
    return [entry for entry in entries if key_of(entry) > key]


def _encode(key: SortKey, digest: int) -> str:
    body = json.dumps([digest, *key], separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(zlib.crc32(body).to_bytes(4) + body).decode()


def _decode(token: str, digest: int) -> SortKey:
    try:
        if len(token) > MAX_TOKEN_CHARS:
            raise BadPageToken
        packed = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        if zlib.crc32(packed[4:]) != int.from_bytes(packed[:4]):
            raise BadPageToken
        given, at_s, tenant, request_id = json.loads(packed[4:])
    except (ValueError, TypeError, RecursionError):  # The sender can compute the checksum too.
        raise BadPageToken from None
    is_key = isinstance(at_s, float) and isinstance(tenant, str) and isinstance(request_id, str)
    # Python reads Infinity and NaN as JSON, but no entry comes after them.
    if given != digest or not is_key or not math.isfinite(at_s):
        raise BadPageToken
    return at_s, tenant, request_id
