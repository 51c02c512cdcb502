"""Encodes operators' requests as messages.

Owns the limits of both clients' calls to OperationsService. Raises ValueError for a value that does
not fit.
"""

import math

from google.protobuf.duration_pb2 import Duration

import penstock.v1 as pb
from penstock.client.events import RequestState
from penstock.client.operations_values import FlightFormat, ServerProcess

DEFAULT_PROFILE_S = 5.0
FILE_DEADLINE_S = 60.0
"""Deadline of calls that return a file, seconds."""
MAX_PAGE_SIZE = 1000


def watch_request(model: str | None, interval_s: float | None) -> pb.WatchStatsRequest:
    """Return the message of a watch; `interval_s` None: the server's default."""
    interval = None if interval_s is None else _duration("interval_s", interval_s)
    return pb.WatchStatsRequest(model=model, interval=interval)


def list_request(
    model: str | None, tenant: str | None, state: RequestState | None, max_requests: int | None
) -> pb.ListLiveRequestsRequest:
    """Return the message that requests the first page."""
    if max_requests is not None and max_requests < 1:
        raise ValueError(f"max_requests: must be at least 1, not {max_requests}")
    return pb.ListLiveRequestsRequest(
        model=model,
        tenant=tenant,
        state=None if state is None else pb.RequestState.ValueType(state),
        page_size=min(max_requests or MAX_PAGE_SIZE, MAX_PAGE_SIZE),
    )


def drain_request(timeout_s: float | None) -> pb.DrainRequest:
    """Return the message of a drain; `timeout_s` None: the server's setting."""
    timeout = None if timeout_s is None else _duration("timeout_s", timeout_s)
    return pb.DrainRequest(drain_timeout=timeout)


def flight_request(
    model: str | None, max_steps: int | None, file_format: FlightFormat | None
) -> pb.GetFlightRecordRequest:
    """Request the record as a file of this format; None: as messages."""
    steps = pb.FlightRecordFormat.Value("FLIGHT_RECORD_FORMAT_STEPS")
    return pb.GetFlightRecordRequest(
        model=model,
        max_steps=max_steps,
        format=steps if file_format is None else pb.FlightRecordFormat.ValueType(file_format),
    )


def profile_request(
    process: ServerProcess, front_index: int | None, duration_s: float
) -> pb.ProfileRequest:
    """Encode the request; the server validates it."""
    return pb.ProfileRequest(
        process=pb.ServerProcess.ValueType(process),
        front_index=front_index,
        duration=_duration("duration_s", duration_s),
    )


def _duration(name: str, value_s: float) -> Duration:
    if not (math.isfinite(value_s) and value_s >= 0):
        raise ValueError(f"{name}: must be finite and not negative, not {value_s}")
    duration = Duration()
    duration.FromMicroseconds(round(value_s * 1e6))
    return duration
