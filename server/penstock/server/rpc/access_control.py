"""Access control of gRPC calls: authenticates and authorises the caller before a body is read.

Owns the right that each method requires, and the credentials of a call: its Authorization metadata
and its certificate. The authenticator maps credentials to a caller; without an authenticator every
call is allowed, for the tenant named by a proxy or for none. The handler receives the caller with
the message (`read_limiter.py`); handlers must not check again, since the policy may have changed
meanwhile.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Final

from penstock.server.front.errors import ErrorReason, RequestError, refuse, refuse_field
from penstock.server.rpc.handlers import Context
from penstock.server.security.authenticator import NotListed, Unknown
from penstock.server.security.rights import ANONYMOUS, Caller, Right
from penstock.server.security.security import Security
from penstock.server.tenants import NO_TENANT, tenant_fault

AUTHORIZATION_KEY: Final = "authorization"
_NAME_KINDS: Final[Mapping[str, str]] = {
    "x509_common_name": "cn",
    "peer_dns": "dns",
    "peer_uri": "uri",
    "peer_email": "email",
}
_log = logging.getLogger(__name__)
_BY_SERVICE: Final[Mapping[str, Right | None]] = {
    "penstock.v1.GenerationService": Right.GENERATE,
    "penstock.v1.ModelService": Right.MODELS,
    "penstock.v1.OperationsService": Right.OPERATIONS_READ,
    "grpc.channelz.v1.Channelz": Right.INSPECT,
    "grpc.reflection.v1.ServerReflection": Right.INSPECT,
    "grpc.reflection.v1alpha.ServerReflection": Right.INSPECT,
    # Load balancers call it; it reveals nothing.
    "grpc.health.v1.Health": None,
}
_BY_METHOD: Final[Mapping[str, Right | None]] = {
    "/penstock.v1.GenerationService/Cancel": Right.CANCEL,
    "/penstock.v1.ModelService/LoadModel": Right.LOAD_MODELS,
    "/penstock.v1.ModelService/UnloadModel": Right.LOAD_MODELS,
    "/penstock.v1.ModelService/SetModelAlias": Right.LOAD_MODELS,
    "/penstock.v1.ModelService/LoadAdapter": Right.LOAD_MODELS,
    "/penstock.v1.ModelService/UnloadAdapter": Right.LOAD_MODELS,
    "/penstock.v1.OperationsService/Drain": Right.OPERATIONS_WRITE,
    "/penstock.v1.OperationsService/DumpFlightRecord": Right.OPERATIONS_WRITE,
    "/penstock.v1.OperationsService/SetLogLevel": Right.OPERATIONS_WRITE,
    "/penstock.v1.OperationsService/Profile": Right.OPERATIONS_WRITE,
}


class AccessControl:
    """Admits callers. `security` None: every caller is admitted.

    `tenant_metadata_key`: see `FrontConfig`. Raises ValueError if it is set together with
    credentials.
    """

    def __init__(self, security: Security | None = None, *, tenant_metadata_key: str = "") -> None:
        self._security = security
        self._authenticator = None if security is None else security.authenticator
        if self._authenticator is not None and tenant_metadata_key:
            raise ValueError(
                "tenant_metadata_key and credentials exclude each other: the tenant comes from the"
                " credential"
            )
        self._tenant_metadata_key = tenant_metadata_key
        self._by_method = dict(_BY_METHOD)

    def add_rights(self, rights: Mapping[str, Right | None]) -> None:
        """Add the rights that the methods of a gateway require: see `GatewayService`."""
        self._by_method.update(rights)

    def right_of(self, path: str) -> Right | None:
        """Return the right that the method at `path` ("/package.Service/Method") requires; None for
        none.

        Raises KeyError for an unlisted method: every method must be listed.
        """
        if path in self._by_method:
            return self._by_method[path]
        return _BY_SERVICE[path[1:].rpartition("/")[0]]

    def admit(self, context: Context, right: Right) -> Caller:
        """Return the caller, if it has `right`.

        Raises RequestError: UNAUTHENTICATED, PERMISSION_DENIED, or naming the tenant's metadata
        key. The reason for refusing a credential is only logged.
        """
        try:
            caller = self._identify(context)
        except Unknown as error:
            _log.info("caller refused: %s (%s)", error, context.peer())
            raise refuse(ErrorReason.UNAUTHENTICATED) from None
        except NotListed as error:
            _log.info("caller refused: %s (%s)", error, context.peer())
            raise refuse(ErrorReason.PERMISSION_DENIED) from None
        require(right, caller, context)
        return caller

    def admit_again(self, context: Context, right: Right, tenant: str) -> Caller:
        """Check a later request of a call that `tenant` opened, as `admit` does; the tenant must
        not change.
        """
        caller = self.admit(context, right)
        if caller.tenant != tenant:
            raise refuse(ErrorReason.UNAUTHENTICATED)
        return caller

    def _identify(self, context: Context) -> Caller:
        if self._authenticator is not None:
            return self._authenticator.identify(
                authorizations_of(context), lambda: certificate_names(context)
            )
        key = self._tenant_metadata_key
        if not key:
            return ANONYMOUS
        tenant = _tenant_of(context, key)
        if self._security is None:
            return dataclasses.replace(ANONYMOUS, tenant=tenant)
        return self._security.vouched_for(tenant)


def require(right: Right, caller: Caller, context: Context) -> None:
    """Raise RequestError (PERMISSION_DENIED) if a caller lacks a right."""
    if right not in caller.rights:
        _log.info("tenant %s lacks the right %s (%s)", caller.tenant, right.value, context.peer())
        raise refuse(ErrorReason.PERMISSION_DENIED)


def authorizations_of(context: Context) -> list[str]:
    """Return all values of the Authorization metadata."""
    metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    return [
        value if isinstance(value, str) else value.decode("latin-1")
        for key, value in metadata
        if key == AUTHORIZATION_KEY
    ]


def certificate_names(context: Context) -> list[str]:
    """Return the names in the caller's certificate, in the form of policies: `cn:NAME`,
    `dns:NAME`.
    """
    shown = context.auth_context()
    return [
        f"{kind}:{name.decode('utf-8', 'replace')}"
        for key, kind in _NAME_KINDS.items()
        for name in shown.get(key, ())
    ]


def _tenant_of(context: Context, key: str) -> str:
    """Return the tenant in the metadata of a call; NO_TENANT without `key` or without a value for
    it.

    Raises RequestError naming the key if the value is not a valid name or occurs more than once.
    """
    if not key:
        return NO_TENANT
    metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    values = [value for name, value in metadata if name == key]
    if not values:
        return NO_TENANT
    if len(values) > 1:
        raise _refuse_metadata(key, f"occurs {len(values)} times, must occur once")
    value = values[0]
    name = value if isinstance(value, str) else value.decode("latin-1")
    fault = tenant_fault(name)
    if fault is not None:
        raise _refuse_metadata(key, fault)
    return name


def _refuse_metadata(key: str, description: str) -> RequestError:
    return refuse_field(f"metadata[{key}]", description)
