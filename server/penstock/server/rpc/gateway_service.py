"""The interface of a gateway's service that is served next to ours on the same port.

Owns the protocol. Does not know which gateways there are.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import grpc

from penstock.server.front.front import Front
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.handlers import HandlerWrapper
from penstock.server.security.rights import Right


class GatewayService(Protocol):
    """The handlers of one such service. `name`: "package.Service", for health and reflection.

    `rights`: what each of its methods requires, by path ("/package.Service/Method"); None: nothing.
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
        """All methods of the service."""
        ...


GatewayServiceMaker = Callable[[Front, AccessControl], GatewayService]
"""Creates the service over the front of a process."""
