"""Who calls, and whether the call is theirs to make: judged once, before a body is read.

Owns what a gRPC call shows of its caller: its Authorization metadata and its certificate. Who that
makes it, the authenticator knows; without one everybody may call, as the tenant that a proxy names
or as nobody. The judgement goes to the handler with the message (`arrival.py`), which must not ask
again: another policy may be in force by then.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Final

from penstock.server.front.errors import ErrorReason, refuse
from penstock.server.rpc.caller import tenant_of
from penstock.server.rpc.handlers import Context
from penstock.server.security.authenticator import NotListed, Unknown
from penstock.server.security.rights import ANONYMOUS, Caller, Right
from penstock.server.security.security import Security

AUTHORIZATION_KEY: Final = "authorization"
_NAME_KINDS: Final[Mapping[str, str]] = {
    "x509_common_name": "cn",
    "peer_dns": "dns",
    "peer_uri": "uri",
    "peer_email": "email",
}
_log = logging.getLogger(__name__)


class Gate:
    """Lets callers in. `security` None: everybody may call.

    `tenant_metadata_key`: see `FrontConfig`; not together with credentials. Raises ValueError for
    both.
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

    def admit(self, context: Context, right: Right) -> Caller:
        """The caller, if it may do this.

        Raises RequestError: UNAUTHENTICATED, PERMISSION_DENIED, or naming the metadata key of the
        tenant. What was wrong with a credential is told to our log alone.
        """
        try:
            caller = self._identify(context)
        except Unknown as error:
            _log.info("turned a caller away: %s (%s)", error, context.peer())
            raise refuse(ErrorReason.UNAUTHENTICATED) from None
        except NotListed as error:
            _log.info("turned a caller away: %s (%s)", error, context.peer())
            raise refuse(ErrorReason.PERMISSION_DENIED) from None
        require(right, caller, context)
        return caller

    def admit_again(self, context: Context, right: Right, tenant: str) -> Caller:
        """As `admit`, of a call that was opened by `tenant` and goes on: it stays that tenant's."""
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
        tenant = tenant_of(context, key)
        if self._security is None:
            return dataclasses.replace(ANONYMOUS, tenant=tenant)
        return self._security.vouched_for(tenant)


def require(right: Right, caller: Caller, context: Context) -> None:
    """Refuse a caller that lacks a right. Raises RequestError: PERMISSION_DENIED."""
    if right not in caller.rights:
        _log.info("tenant %s may not %s (%s)", caller.tenant, right.value, context.peer())
        raise refuse(ErrorReason.PERMISSION_DENIED)


def authorizations_of(context: Context) -> list[str]:
    """All values of the Authorization metadata."""
    metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    return [
        value if isinstance(value, str) else value.decode("latin-1")
        for key, value in metadata
        if key == AUTHORIZATION_KEY
    ]


def certificate_names(context: Context) -> list[str]:
    """The names in the caller's certificate, as policies write them: `cn:NAME`, `dns:NAME`."""
    shown = context.auth_context()
    return [
        f"{kind}:{name.decode('utf-8', 'replace')}"
        for key, kind in _NAME_KINDS.items()
        for name in shown.get(key, ())
    ]
