"""What callers may be allowed to do, and who a caller turned out to be.

Owns the names of rights. Does not know how a caller proves anything, nor which call needs which.
"""

import enum
from dataclasses import dataclass
from typing import Final

from penstock.server.front.tenants import NO_CEILINGS, NO_TENANT, PriorityCeilings


class Right(enum.StrEnum):
    """One thing that a tenant may be allowed.

    GENERATE: all calls that make output, `Resume` among them. CANCEL: `Cancel`. MODELS: to look at
    models and to use their tokenizers. LOAD_MODELS: to load and unload them. INSPECT: reflection
    and channelz, which tells the addresses of other callers. OPERATIONS_READ: what goes on, of all
    tenants. OPERATIONS_WRITE: drain, log levels, profiles, files on the server. METRICS: the
    metrics port, where that asks at all.
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
"""What a tenant may do that nobody said anything of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The tenant that calls, its rights, and the highest priorities its requests get."""

    tenant: str
    rights: frozenset[Right]
    ceilings: PriorityCeilings = NO_CEILINGS


ANONYMOUS: Final = Caller(tenant=NO_TENANT, rights=ALL_RIGHTS)
"""Every caller of a service that asks for no credentials."""
