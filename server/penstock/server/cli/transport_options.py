"""The settings of `penstock serve` that bound connections and calls that are only begun."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.server.cli.option import Option

if TYPE_CHECKING:
    from penstock.server.front.transport import TransportConfig

TRANSPORT_OPTIONS = (
    Option(
        flag="max-connections",
        parse=int,
        default=None,
        help="connections that one front holds open at a time (default: 2000)",
    ),
    Option(
        flag="handshake-timeout-s",
        parse=float,
        default=None,
        help="seconds for the greetings of TLS and HTTP/2 on a new connection (default: 10)",
    ),
    Option(
        flag="max-arrival-s",
        parse=float,
        default=None,
        help="seconds that the message of a call may take to arrive (default: 30)",
    ),
    Option(
        flag="max-connection-age-s",
        parse=float,
        default=None,
        help="seconds after which a connection takes no more calls, so that clients spread anew"
        " (default: 1800)",
    ),
)


def transport_config(settings: Mapping[str, Any]) -> "TransportConfig":
    """The bounds that the settings say. Raises ValueError naming the field that is off."""
    from penstock.server.front.transport import TransportConfig

    given = {option.name: settings[option.name] for option in TRANSPORT_OPTIONS}
    return TransportConfig(**{name: value for name, value in given.items() if value is not None})
