"""Discovers gateways. With a gateway, fronts (gRPC server processes) serve another protocol in
addition to Penstock's API.

A gateway is an entry point of the group `penstock.gateways` that names a module. The module is
imported only if the gateway is configured.
"""

from collections.abc import Collection
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, Protocol, cast

from penstock.scheduler.setting import SettingError

if TYPE_CHECKING:
    from penstock.server.front.front import Front
    from penstock.server.ipc.board import BoardView
    from penstock.server.rpc.access_control import AccessControl
    from penstock.server.rpc.gateway_service import GatewayService

NO_GATEWAY: Final = "none"
_GROUP: Final = "penstock.gateways"


class Gateway(Protocol):
    """The interface that the module of a gateway implements."""

    @property
    def request_methods(self) -> Collection[str]:
        """The full names ("package.Service/Method") of the RPCs that carry generation requests."""
        ...

    def check_installed(self) -> None:
        """Raise ValueError if a package that the gateway needs is missing; the error names the
        extra that installs it."""
        ...

    def make_service(
        self, front: "Front", access: "AccessControl", board: "BoardView | None"
    ) -> "GatewayService":
        """Return the gateway's gRPC service for one front.

        `board` is the engine's status board in shared memory, with the load of the engine; None
        without a board.
        """
        ...


def load_gateway(name: str) -> Gateway:
    """Return the gateway with this name. Raises SettingError if there is none; the error lists the
    available names."""
    found = {point.name: point for point in entry_points(group=_GROUP)}
    if name not in found:
        names = ", ".join([NO_GATEWAY, *sorted(found)])
        raise SettingError(f"{{}} must be one of {names}, not {name!r}", "gateway")
    return cast("Gateway", found[name].load())
