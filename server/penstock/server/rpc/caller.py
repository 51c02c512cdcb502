"""Who calls: the tenant, as a call's metadata names it.

Owns the reading of that one metadata key. Takes the value at its word: it is for services behind a
proxy that knows its callers and sets the key itself (`FrontConfig.tenant_metadata_key`).
"""

from collections.abc import Iterable

from penstock.server.front.errors import RequestError, refuse_field
from penstock.server.front.tenants import NO_TENANT, tenant_fault
from penstock.server.rpc.handlers import Context


def tenant_of(context: Context, key: str) -> str:
    """The tenant of a call; NO_TENANT without a `key`, and where the call does not have it.

    Raises RequestError naming the key when its value is no name or is there more than once.
    """
    if not key:
        return NO_TENANT
    metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    values = [value for name, value in metadata if name == key]
    if not values:
        return NO_TENANT
    if len(values) > 1:
        raise _refuse(key, f"is there {len(values)} times, one value is wanted")
    value = values[0]
    name = value if isinstance(value, str) else value.decode("latin-1")
    fault = tenant_fault(name)
    if fault is not None:
        raise _refuse(key, fault)
    return name


def _refuse(key: str, description: str) -> RequestError:
    return refuse_field(f"metadata[{key}]", description)
