"""The rights of callers, and the authenticated caller.

Owns the names of rights. Does not know how callers authenticate, nor which call needs which right.
"""

import enum
from dataclasses import dataclass
from typing import Final

from penstock.server.tenants import NO_CEILINGS, NO_TENANT, PriorityCeilings


class Right(enum.StrEnum):
    """A right that a tenant may have.

    GENERATE: all calls that generate output, `Resume` included. CANCEL: `Cancel`. MODELS: list
    models and use their tokenizers. LOAD_MODELS: load and unload them. INSPECT: reflection and
    channelz, which shows the addresses of other callers. OPERATIONS_READ: monitoring, of all
    tenants. OPERATIONS_WRITE: drain, log levels, profiles, files on the server. METRICS: the
    metrics port, if it requires a right.
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
    """The tenant that calls, its rights, and the highest priorities its requests get."""

    tenant: str
    rights: frozenset[Right]
    ceilings: PriorityCeilings = NO_CEILINGS


ANONYMOUS: Final = Caller(tenant=NO_TENANT, rights=ALL_RIGHTS)
"""The caller of a service without authentication."""
