"""The interface of a gateway's gRPC service.

A gateway converts another protocol to Penstock's API. Its service is served on the same port as
Penstock's services. `penstock.server.gateways` discovers the installed gateways.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import grpc

from penstock.server.front.front import Front
from penstock.server.rpc.access_control import AccessControl
from penstock.server.rpc.handlers import HandlerWrapper
from penstock.server.security.rights import Right


class GatewayService(Protocol):
    """A gRPC service of another protocol, served on the same port as Penstock's services."""

    @property
    def name(self) -> str:
        """The full name of the service ("package.Service"), for health and reflection."""
        ...

    @property
    def rights(self) -> Mapping[str, Right | None]:
        """The right that each method requires, by path ("/package.Service/Method"); None if it
        requires none."""
        ...

    def handlers(self, wrapper: HandlerWrapper) -> grpc.GenericRpcHandler:
        """Return the gRPC handlers of all methods of the service, created with `wrapper`."""
        ...


GatewayServiceMaker = Callable[[Front, AccessControl], GatewayService]
"""Creates the service of a gateway for one gRPC server process."""
