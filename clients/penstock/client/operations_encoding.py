"""Encodes the requests of OperationsService as protobuf messages.

Checks the limits of arguments, for both clients of OperationsService. Raises ValueError or
TypeError, naming the argument, if one does not fit.
"""

from numbers import Integral, Real

from google.protobuf.duration_pb2 import Duration

import penstock.v1 as pb
from penstock.client.argument_types import require_number, require_type
from penstock.client.encoding import filled
from penstock.client.events import RequestState
from penstock.client.operations_values import FlightFormat, LogLevel, ServerProcess
from penstock.conventions import MAX_DURATION_S, MAX_PAGE_SIZE

FILE_DEADLINE_S = 60.0
"""Deadline of calls that return a file, in seconds."""


def watch_request(model: str | None, interval_s: float | None) -> pb.WatchStatsRequest:
    """Return the message that requests snapshots. If `interval_s` is None, the server's default
    applies."""
    interval = None if interval_s is None else _duration("interval_s", interval_s)
    return filled(pb.WatchStatsRequest(interval=interval), model=model)


def list_request(
    model: str | None, tenant: str | None, state: RequestState | None, max_requests: int | None
) -> pb.ListLiveRequestsRequest:
    """Return the message that requests the first page of the live requests."""
    if max_requests is not None:
        require_number(max_requests, "max_requests", Integral, at_least=1)
    require_type(state, "state", RequestState, None)
    message = pb.ListLiveRequestsRequest(
        state=None if state is None else pb.RequestState.ValueType(state),
        page_size=min(max_requests or MAX_PAGE_SIZE, MAX_PAGE_SIZE),
    )
    return filled(message, model=model, tenant=tenant)


def drain_request(timeout_s: float | None) -> pb.DrainRequest:
    """Return the message that requests a drain. If `timeout_s` is None, the server's setting
    applies."""
    timeout = None if timeout_s is None else _duration("timeout_s", timeout_s)
    return pb.DrainRequest(drain_timeout=timeout)


def flight_request(
    model: str | None, max_steps: int | None, file_format: FlightFormat | None
) -> pb.GetFlightRecordRequest:
    """Return the message that requests the flight record.

    If `file_format` is None, the record is requested as messages instead of a file.
    """
    require_type(file_format, "file_format", FlightFormat, None)
    steps = pb.FlightRecordFormat.Value("FLIGHT_RECORD_FORMAT_STEPS")
    message = pb.GetFlightRecordRequest(
        format=steps if file_format is None else pb.FlightRecordFormat.ValueType(file_format)
    )
    return filled(message, model=model, max_steps=max_steps)


def log_level_request(level: LogLevel) -> pb.SetLogLevelRequest:
    """Return the message that sets the log level."""
    require_type(level, "level", LogLevel)
    return pb.SetLogLevelRequest(level=pb.LogLevel.ValueType(level))


def profile_request(
    process: ServerProcess, front_index: int | None, duration_s: float
) -> pb.ProfileRequest:
    """Return the message that requests a profile."""
    require_type(process, "process", ServerProcess)
    message = pb.ProfileRequest(
        process=pb.ServerProcess.ValueType(process), duration=_duration("duration_s", duration_s)
    )
    return filled(message, front_index=front_index)


def _duration(name: str, value_s: float) -> Duration:
    require_number(value_s, name, Real, at_least=0, at_most=MAX_DURATION_S)
    duration = Duration()
    duration.FromMicroseconds(round(value_s * 1e6))
    return duration
