"""gRPC status codes as spans tell them: their names, and which make a server's span an error.

Knows no grpc and no OpenTelemetry. Source of the rule: semantic conventions 1.44, "gRPC", span of
the server: a client's mistake, a refusal or a cancellation is no error of ours.
"""

from penstock.server.observe.status_names import STATUS_NAMES

_UNKNOWN = 2
_ERRORS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)


def status_name(code: int) -> str:
    """The name of a status code; `UNKNOWN` for a number that is none, as gRPC itself reads it."""
    return STATUS_NAMES[code if 0 <= code < len(STATUS_NAMES) else _UNKNOWN]


def is_server_error(code: int) -> bool:
    """Whether a request that ended with this code makes its span an error."""
    return status_name(code) in _ERRORS
