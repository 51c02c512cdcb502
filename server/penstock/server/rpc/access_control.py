"""Access control of gRPC calls: authenticates and authorises the caller before a message is read.

Defines the right that each method requires, and reads the credentials of a call: its Authorization
metadata and its client certificate. The authenticator maps credentials to a caller. Without an
authenticator, a proxy may send the tenant in the metadata. The caller then has the rights that the
policy file (a list of tenants and their rights) grants to this tenant; without a file it has all
rights. The handler receives the caller together with the message (`read_limiter.py`). It must not
check again, because the policy may have changed meanwhile. Only the handler of Multiplex calls this
module: it checks the call, and each request when the request arrives.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Final

from penstock.conventions import NO_CREDENTIALS
from penstock.server.front.errors import ErrorReason, RequestError, invalid_field, request_error
from penstock.server.rpc import service_names
from penstock.server.rpc.handlers import Context
from penstock.server.security.authenticator import (
    InvalidCredentials,
    MissingCredentials,
    TenantNotListed,
)
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
logger = logging.getLogger(__name__)
_BY_SERVICE: Final[Mapping[str, Right | None]] = {
    service_names.GENERATION: Right.GENERATE,
    service_names.MODEL: Right.MODELS,
    service_names.OPERATIONS: Right.OPERATIONS_READ,
    service_names.CHANNELZ: Right.INSPECT,
    service_names.REFLECTION: Right.INSPECT,
    service_names.REFLECTION_ALPHA: Right.INSPECT,
    # Load balancers call it, and it reveals no data.
    service_names.HEALTH: None,
}
_OTHER_RIGHTS: Final = (
    (service_names.GENERATION, Right.CANCEL, ("Cancel",)),
    (
        service_names.MODEL,
        Right.LOAD_MODELS,
        ("LoadModel", "UnloadModel", "SetModelAlias", "LoadAdapter", "UnloadAdapter"),
    ),
    (
        service_names.OPERATIONS,
        Right.OPERATIONS_WRITE,
        ("Drain", "DumpFlightRecord", "SetLogLevel", "Profile"),
    ),
)
"""Methods that require another right than their service."""
_BY_METHOD: Final[Mapping[str, Right | None]] = {
    f"/{service_names.method_name(service, method)}": right
    for service, right, methods in _OTHER_RIGHTS
    for method in methods
}


class AccessControl:
    """Authenticates the callers of methods and checks their rights. If `security` is None, all
    callers are authorised.

    `tenant_metadata_key`: see `FrontConfig`. Raises ValueError if it is set although `security` has
    an authenticator.
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
        """Add the rights that the methods of a gateway require, keyed by method path (see
        `GatewayService`)."""
        self._by_method.update(rights)

    def right_of(self, path: str) -> Right | None:
        """Return the right that the method at `path` ("/package.Service/Method") requires; None if
        it requires none.

        A method that is not listed requires the right of its service. Raises KeyError for an
        unknown service.
        """
        if path in self._by_method:
            return self._by_method[path]
        return _BY_SERVICE[path[1:].rpartition("/")[0]]

    def authorize(self, context: Context, right: Right) -> Caller:
        """Authenticate the caller of a call, check that it has `right`, and return it.

        Raises RequestError: UNAUTHENTICATED; PERMISSION_DENIED without `right`, or for a tenant
        that is not in the policy file; or INVALID_ARGUMENT for an invalid tenant in the metadata.
        The reason why a credential is rejected is only logged.
        """
        try:
            caller = self._identify(context)
        except InvalidCredentials as error:
            logger.info("caller rejected: %s (%s)", error, context.peer())
            message = NO_CREDENTIALS if isinstance(error, MissingCredentials) else ""
            raise request_error(ErrorReason.UNAUTHENTICATED, message) from None
        except TenantNotListed as error:
            logger.info("caller rejected: %s (%s)", error, context.peer())
            raise request_error(ErrorReason.PERMISSION_DENIED) from None
        require(right, caller, context)
        return caller

    def authorize_again(self, context: Context, right: Right, tenant: str) -> Caller:
        """Return the caller for a later request of a call that `tenant` opened, checked as by
        `authorize`.

        Raises the same errors, and RequestError (UNAUTHENTICATED) if the tenant has changed.
        """
        caller = self.authorize(context, right)
        if caller.tenant != tenant:
            raise request_error(ErrorReason.UNAUTHENTICATED)
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
        return self._security.proxy_caller(tenant)


def require(right: Right, caller: Caller, context: Context) -> None:
    """Raise RequestError (PERMISSION_DENIED) if `caller` lacks `right`."""
    if right not in caller.rights:
        logger.info("tenant %s lacks the right %s (%s)", caller.tenant, right.value, context.peer())
        message = f"the tenant lacks the right {right.value}"
        raise request_error(ErrorReason.PERMISSION_DENIED, message)


def authorizations_of(context: Context) -> list[str]:
    """Return all values of the Authorization metadata of a call."""
    metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    return [
        value if isinstance(value, str) else value.decode("latin-1")
        for key, value in metadata
        if key == AUTHORIZATION_KEY
    ]


def certificate_names(context: Context) -> list[str]:
    """Return the names in the caller's certificate in the format of policy files: `cn:NAME`,
    `dns:NAME`, `uri:NAME`, `email:NAME`. The list is empty if there is no certificate."""
    names = context.auth_context()
    return [
        f"{kind}:{name.decode('utf-8', 'replace')}"
        for key, kind in _NAME_KINDS.items()
        for name in names.get(key, ())
    ]


def _tenant_of(context: Context, key: str) -> str:
    """Return the tenant in the metadata of a call; NO_TENANT without `key` or without a value for
    it.

    Raises RequestError (INVALID_ARGUMENT) if the value is not a valid name or occurs more than
    once.
    """
    if not key:
        return NO_TENANT
    metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    values = [value for name, value in metadata if name == key]
    if not values:
        return NO_TENANT
    if len(values) > 1:
        raise _invalid_metadata(key, f"occurs {len(values)} times, must occur once")
    value = values[0]
    name = value if isinstance(value, str) else value.decode("latin-1")
    fault = tenant_fault(name)
    if fault is not None:
        raise _invalid_metadata(key, fault)
    return name


def _invalid_metadata(key: str, description: str) -> RequestError:
    return invalid_field(f"metadata[{key}]", description)
