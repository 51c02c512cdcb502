"""The rights that callers may have, and the type of an authenticated caller.

Defines the names of rights; `access_control.py` defines which call needs which right.
"""

import enum
from dataclasses import dataclass
from typing import Final

from penstock.server.tenants import NO_CEILINGS, NO_TENANT, PriorityCeilings


class Right(enum.StrEnum):
    """A right that a tenant may have.

    Attributes:
        GENERATE: Make all calls that generate output, including `Resume`.
        CANCEL: Make the call `Cancel`.
        MODELS: List and watch models, and use their tokenizers.
        LOAD_MODELS: Load and unload models and adapters, and set aliases of models.
        INSPECT: Use gRPC reflection and channelz. channelz returns the addresses of other callers.
        OPERATIONS_READ: Read the statistics, the live requests of all tenants, and the flight
            record.
        OPERATIONS_WRITE: Drain the service, set log levels, take profiles, and write flight records
            to files on the server.
        METRICS: Read the metrics and the status page on the metrics port, if that port requires
            authentication.
    """

    GENERATE = "generate"
    CANCEL = "cancel"
    MODELS = "models"
    LOAD_MODELS = "load_models"
    INSPECT = "inspect"
    OPERATIONS_READ = "operations_read"
    OPERATIONS_WRITE = "operations_write"
    METRICS = "metrics"


ALL_RIGHTS: Final = frozenset(Right)
CLIENT_RIGHTS: Final = frozenset({Right.GENERATE, Right.CANCEL, Right.MODELS})
"""The default rights of a tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An authenticated caller: its tenant, its rights, and the maximum priorities of its
    requests."""

    tenant: str
    rights: frozenset[Right]
    ceilings: PriorityCeilings = NO_CEILINGS


ANONYMOUS: Final = Caller(tenant=NO_TENANT, rights=ALL_RIGHTS)
"""The caller of a service without authentication."""
