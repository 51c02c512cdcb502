"""Checks tenant names, creates request ids, and defines the maximum priorities of a tenant.

Also counts bytes per tenant. Does not authenticate tenants.
"""

import os
from dataclasses import dataclass
from typing import Final

NO_TENANT: Final = ""
"""The tenant of all requests when the service is configured without tenants."""
MAX_TENANT_CHARS: Final = 128
MAX_PRIORITY: Final = 100
"""The highest scheduling priority and the highest retention level."""
_SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True)
class PriorityCeilings:
    """Maximum priorities of a tenant's requests. A higher requested priority is lowered to the
    maximum.

    `scheduling` is the maximum priority of a request in the queue; `retention` is the maximum
    priority of its blocks in the prefix cache.
    """

    scheduling: int = MAX_PRIORITY
    retention: int = MAX_PRIORITY


NO_CEILINGS: Final = PriorityCeilings()


def tenant_fault(name: str) -> str | None:
    """Return why the tenant name is invalid, or None if it is valid.

    A comma is invalid because a proxy may join several values of one metadata key with commas.
    """
    if not 1 <= len(name) <= MAX_TENANT_CHARS:
        return f"must have 1 to {MAX_TENANT_CHARS} characters"
    if not (name.isascii() and name.isprintable()):
        return "must be printable ASCII"
    if "," in name:
        return "must be a single value, without a comma"
    return None


def engine_request_id(tenant: str, request_id: str) -> str:
    """Return the engine's id of a request.

    It contains the tenant name, if any, because different tenants may choose equal request ids.
    Neither part can contain the separator, so ids of different tenants never collide.
    """
    return f"{tenant}{_SEPARATOR}{request_id}" if tenant else request_id


def client_request_id(tenant: str, engine_id: str) -> str:
    """Return the id that the client chose, given the engine's id of the request."""
    return engine_id.removeprefix(engine_request_id(tenant, ""))


class TenantBytes:
    """A number of bytes for each tenant. `total` is the sum over all tenants."""

    __slots__ = ("_by_tenant", "total")

    def __init__(self) -> None:
        self._by_tenant: dict[str, int] = {}
        self.total = 0

    def add(self, tenant: str, num_bytes: int) -> None:
        """Add `num_bytes` to the number of bytes of a tenant. `num_bytes` may be negative."""
        self.total += num_bytes
        num_bytes += self._by_tenant.pop(tenant, 0)
        if num_bytes:
            self._by_tenant[tenant] = num_bytes

    @property
    def largest(self) -> str:
        """The tenant with the most bytes. Raises ValueError if there is none."""
        return max(self._by_tenant, key=self._by_tenant.__getitem__)


def new_request_id() -> str:
    """Return a random UUID (RFC 9562, version 4) as text. Faster than `uuid.uuid4`."""
    data = bytearray(os.urandom(16))
    data[6] = data[6] & 0x0F | 0x40
    data[8] = data[8] & 0x3F | 0x80
    digits = data.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
