"""Names of gRPC status codes for spans and metrics, and which codes make a server span an error.

Imports neither grpc nor OpenTelemetry. The rule is from the OpenTelemetry semantic conventions
1.44, "gRPC", server span: the codes for a client's error, a rejection for lack of resources and a
cancellation are not errors of the server.
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
"""Names of the codes, by number."""


_UNKNOWN = 2
_ERRORS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)


def status_name(code: int) -> str:
    """Return the name of a status code; `UNKNOWN` for other numbers, as in gRPC."""
    return STATUS_NAMES[code if 0 <= code < len(STATUS_NAMES) else _UNKNOWN]


def is_server_error(code: int) -> bool:
    """Return True if a request that ended with this code makes its span an error."""
    return status_name(code) in _ERRORS
