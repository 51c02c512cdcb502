"""The names of gRPC's status codes for spans and metrics, and which make a server's span an error.

Knows no grpc and no OpenTelemetry. Source of the rule: semantic conventions 1.44, "gRPC", span of
the server: a client's mistake, a refusal or a cancellation is no error of ours.
"""

from typing import Final

STATUS_NAMES: Final = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
"""By code."""


_UNKNOWN = 2
_ERRORS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)


def status_name(code: int) -> str:
    """The name of a status code; `UNKNOWN` for other numbers, as in gRPC."""
    return STATUS_NAMES[code if 0 <= code < len(STATUS_NAMES) else _UNKNOWN]


def is_server_error(code: int) -> bool:
    """Whether a request that ended with this code makes its span an error."""
    return status_name(code) in _ERRORS
