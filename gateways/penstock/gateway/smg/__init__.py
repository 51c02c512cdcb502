"""Adapter for the protocol between the smg gateway and its workers. Fronts (gRPC server processes)
serve this protocol next to Penstock's API.

Implements the interface that `penstock.server.gateways` requires. The other modules, and the
generated code of the extra `gateway`, are imported only in a front process that serves this
protocol.
"""

import importlib.util
from typing import TYPE_CHECKING, Final

from penstock.conventions.extras import requires_extra

if TYPE_CHECKING:
    from penstock.server.front.front import Front
    from penstock.server.ipc.board import BoardView
    from penstock.server.rpc.access_control import AccessControl
    from penstock.server.rpc.gateway_service import GatewayService

request_methods: Final = ("vllm.grpc.engine.VllmEngine/Generate",)
_GENERATED: Final = "smg_grpc_proto"


def check_installed() -> None:
    """Raise ValueError naming the extra, if the generated code is missing."""
    if importlib.util.find_spec(_GENERATED) is None:
        raise ValueError(f"gateway smg {requires_extra('gateway', 'smg-grpc-proto')}")


def make_service(
    front: "Front", access: "AccessControl", board: "BoardView | None"
) -> "GatewayService":
    """Return the service for one front process. `board` reads the engine's load from its status
    board; None if the engine publishes no load."""
    from penstock.gateway.smg.service import VllmEngineService

    return VllmEngineService(front, access, board)
