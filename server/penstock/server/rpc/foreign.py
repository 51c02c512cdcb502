"""What a service of somebody else's contract must be, to be served beside ours on the same port.

Owns the protocol. Does not know which contracts there are.
"""

from collections.abc import Callable
from typing import Protocol

import grpc

from penstock.server.front.front import Front
from penstock.server.rpc.gate import Gate
from penstock.server.rpc.handlers import HandlerWrapper


class ForeignService(Protocol):
    """The handlers of one such service. `name`: "package.Service"; health and reflection name it.

    What its methods ask of a caller is written in `method_rights`.
    """

    @property
    def name(self) -> str:
        """See above."""
        ...

    def handlers(self, wrapper: HandlerWrapper) -> grpc.GenericRpcHandler:
        """All methods of the service."""
        ...


FacadeMaker = Callable[[Front, Gate], ForeignService]
"""Makes the service over the one front of a process."""
