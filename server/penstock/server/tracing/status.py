"""gRPC status codes as spans tell them: their names, and which make a server's span an error.

Knows no grpc and no OpenTelemetry. Source of the rule: semantic conventions 1.44, "gRPC", span of
the server: a client's mistake, a refusal or a cancellation is no error of ours.
"""

_UNKNOWN = 2
_NAMES = (
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
_ERRORS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)


def status_name(code: int) -> str:
    """The name of a status code; `UNKNOWN` for a number that is none, as gRPC itself reads it."""
    return _NAMES[code] if 0 <= code < len(_NAMES) else _NAMES[_UNKNOWN]


def is_server_error(code: int) -> bool:
    """Whether a request that ended with this code makes its span an error."""
    return status_name(code) in _ERRORS
