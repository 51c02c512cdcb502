"""The setting of `penstock serve` that puts another contract beside ours, for a gateway.

Owns it, and what must be there for it. Does not load what a facade is made of.
"""

import logging
from typing import TYPE_CHECKING

from penstock.server.cli.option import Option
from penstock.server.facades import NO_FACADE, load_facade
from penstock.server.logs.rate import ALWAYS

if TYPE_CHECKING:
    from penstock.server.config import ServerConfig

FACADE_OPTIONS = (
    Option(
        flag="facade",
        parse=str,
        default=NO_FACADE,
        help="contract of a gateway to serve on the same port as well: smg for the gateway of that"
        " name, which puts an OpenAI-compatible HTTP in front of many workers (extra gateway)",
    ),
)
_log = logging.getLogger(__name__)


def check_facade(config: "ServerConfig") -> None:
    """Raise ValueError where a facade cannot be served; warn where no gateway would get in."""
    if config.facade == NO_FACADE:
        return
    load_facade(config.facade).check_installed()
    security = config.security
    what = [
        *(["TLS"] if security.has_tls else []),
        *(["credentials"] if security.policy_file is not None else []),
    ]
    if config.num_fronts > 1:
        _log.warning(
            "the %s gateway keeps one connection to this worker, so one of its %d fronts gets all"
            " requests: --fronts 1 says so, and more workers bring more",
            config.facade,
            config.num_fronts,
            extra=ALWAYS,
        )
    if what:
        _log.warning(
            "the port asks for %s and the %s gateway has none: it needs a proxy of its own that"
            " adds them",
            " and ".join(what),
            config.facade,
            extra=ALWAYS,
        )
