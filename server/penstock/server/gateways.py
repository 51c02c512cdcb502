"""Gateway protocols that can be served next to Penstock's own: entry points `penstock.gateways`.

Owns their discovery. An entry point names a module, which is loaded only on request.
"""

from collections.abc import Collection
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, Protocol, cast

from penstock.scheduler.setting import SettingError

if TYPE_CHECKING:
    from penstock.server.front.front import Front
    from penstock.server.link.board import BoardView
    from penstock.server.rpc.access_control import AccessControl
    from penstock.server.rpc.gateway_service import GatewayService

NO_GATEWAY: Final = "none"
_GROUP: Final = "penstock.gateways"


class Gateway(Protocol):
    """The module of a gateway.

    `request_methods`: the methods that carry requests ("package.Service/Method"), as in metrics.
    """

    @property
    def request_methods(self) -> Collection[str]:
        """See above."""
        ...

    def check_installed(self) -> None:
        """Raise ValueError naming the extra if a package is missing."""
        ...

    def make_service(
        self, front: "Front", gate: "AccessControl", board: "BoardView | None"
    ) -> "GatewayService":
        """Return the service over one front. `board`: the engine's load figures; may be None."""
        ...


def load_gateway(name: str) -> Gateway:
    """Return the gateway with this name. Raises SettingError listing the available names."""
    found = {point.name: point for point in entry_points(group=_GROUP)}
    if name not in found:
        names = ", ".join([NO_GATEWAY, *sorted(found)])
        raise SettingError(f"{{}} must be one of {names}, not {name!r}", "gateway")
    return cast("Gateway", found[name].load())
