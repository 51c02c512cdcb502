"""Whose request it is: what a tenant may be called, and how its requests are told from others'.

Owns the names. Does not know where a name comes from; whoever brings one vouches for it.
"""

from dataclasses import dataclass
from typing import Final

NO_TENANT: Final = ""
"""The one tenant of a service that tells none apart."""
MAX_TENANT_CHARS: Final = 128
MAX_PRIORITY: Final = 100
"""The highest scheduling priority and the highest retention priority that there are."""
_SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True)
class PriorityCeilings:
    """The highest priorities that a tenant's requests get; a request for more gets these.

    `scheduling`: of the request in the queue. `retention`: of its blocks in the prefix cache.
    """

    scheduling: int = MAX_PRIORITY
    retention: int = MAX_PRIORITY


NO_CEILINGS: Final = PriorityCeilings()


def tenant_fault(name: str) -> str | None:
    """What `name` must be and is not; None for a good one.

    A comma joins several values of one metadata key wherever a proxy folds them, so a name with
    one in it may be two.
    """
    if not 1 <= len(name) <= MAX_TENANT_CHARS:
        return f"must have 1 to {MAX_TENANT_CHARS} characters"
    if not (name.isascii() and name.isprintable()):
        return "must be printable ASCII"
    if "," in name:
        return "must be a single value, without a comma"
    return None


def engine_request_id(tenant: str, request_id: str) -> str:
    """The id that the engine knows a request by: tenants may choose equal ones.

    Neither part can hold the separator, so no two requests of different tenants meet.
    """
    return f"{tenant}{_SEPARATOR}{request_id}" if tenant else request_id


def own_request_id(tenant: str, engine_id: str) -> str:
    """The id that the tenant gave, from the one that the engine knows."""
    return engine_id.removeprefix(engine_request_id(tenant, ""))
