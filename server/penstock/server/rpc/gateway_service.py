"""The interface of a gateway's service, which is served on the same port as Penstock's services.

Owns the protocol. Independent of which gateways exist.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import grpc

from penstock.server.front.front import Front
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.handlers import HandlerWrapper
from penstock.server.security.rights import Right


class GatewayService(Protocol):
    """The handlers of a gateway's service. `name`: "package.Service", for health and reflection.

    `rights`: the right that each method requires, by path ("/package.Service/Method"); None for
    none.
    """

    @property
    def name(self) -> str:
        """See above."""
        ...

    @property
    def rights(self) -> Mapping[str, Right | None]:
        """See above."""
        ...

    def handlers(self, wrapper: HandlerWrapper) -> grpc.GenericRpcHandler:
        """Return the handlers of all methods."""
        ...


GatewayServiceMaker = Callable[[Front, AccessControl], GatewayService]
"""Creates the service over the front of a process."""
