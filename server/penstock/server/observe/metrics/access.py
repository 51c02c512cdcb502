"""Who may read the metrics port where it asks: bearers of a token with the right to.

Owns the answer to a question without one. Does not know HTTP beyond a status and a header.
"""

import logging
from http import HTTPStatus

from penstock.server.security.authenticator import Authenticator, NotListed, Unknown
from penstock.server.security.rights import Right

_log = logging.getLogger(__name__)


class MetricsAccess:
    """Judges Authorization headers. Threads may share one."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    def fault(self, authorization: str | None) -> HTTPStatus | None:
        """What is answered to a caller with this header instead of metrics; None: let it in."""
        shown = [] if authorization is None else [authorization]
        try:
            # This port asks for no certificate, so there is none.
            caller = self._authenticator.identify(shown, tuple)
        except Unknown as error:
            _log.info("turned away from the metrics port: %s", error)
            return HTTPStatus.UNAUTHORIZED
        except NotListed as error:
            _log.info("turned away from the metrics port: %s", error)
            return HTTPStatus.FORBIDDEN
        if Right.METRICS not in caller.rights:
            _log.info("tenant %s may not read metrics", caller.tenant)
            return HTTPStatus.FORBIDDEN
        return None
