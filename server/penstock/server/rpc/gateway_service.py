"""The interface of a gateway's service that is served next to ours on the same port.

Owns the protocol. Does not know which gateways there are.
"""

from collections.abc import Callable
from typing import Protocol

import grpc

from penstock.server.front.front import Front
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.handlers import HandlerWrapper


class GatewayService(Protocol):
    """The handlers of one such service. `name`: "package.Service", for health and reflection.

    `access_control` has the rights that its methods require.
    """

    @property
    def name(self) -> str:
        """See above."""
        ...

    def handlers(self, wrapper: HandlerWrapper) -> grpc.GenericRpcHandler:
        """All methods of the service."""
        ...


GatewayServiceMaker = Callable[[Front, AccessControl], GatewayService]
"""Creates the service over the front of a process."""
