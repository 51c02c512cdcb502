"""Values that a service and its clients share and that no .proto file declares: default addresses,
limits, the error domain, keys of metadata.

Imports no other module of Penstock: the client does not depend on the server, and commands must not
wait for the import of all settings or of gRPC.
"""

from typing import Final

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 50051
OPERATIONS_OFFSET: Final = 1
METRICS_OFFSET: Final = 2
"""The default ports for operations and for metrics, relative to the port of the service."""
MAX_PORT: Final = 65535

MAX_PAGE_SIZE: Final = 1000
"""Maximum number of items in a page of a list."""
MAX_DURATION_S: Final = 315_576_000_000
"""The largest `google.protobuf.Duration`, seconds."""
DEFAULT_PROFILE_S: Final = 5.0
"""Default duration of a profile, seconds."""

ERROR_DOMAIN: Final = "penstock.dev"
"""`google.rpc.ErrorInfo.domain` of every `ErrorReason`."""

NO_CREDENTIALS: Final = "no credentials: the metadata key authorization is missing"
"""The message of UNAUTHENTICATED for a call without credentials, to which commands add a flag."""

STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"
PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
"""Keys of the metadata of a failed call."""
