"""Flags of the commands that simulate several replicas, and what they mean.

Owns how replicas and their router are named on the command line.
"""

import argparse
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from penstock.server.cli.connection import UsageError
from penstock.tools.simulation.options import told_by_flag

if TYPE_CHECKING:
    from penstock.tools.simulation.routing import RouterKind, RoutingConfig

_ROUTERS = ("round_robin", "least_loaded", "prefix_aware")
_SIGNALS = ("requests", "tokens")
_MEANT_FOR = {
    ("least_loaded", "prefix_aware"): ("load_signal", "load_signal_delay_s"),
    ("prefix_aware",): (
        "overload_factor",
        "overload_slack",
        "min_prefix_share",
        "max_index_tokens",
    ),
}
"""Routers, and the flags that only they take; a flag has the name of its field."""


def add_routing_options(parser: argparse.ArgumentParser, *, has_replicas: bool) -> None:
    """Add the flags of the router, and `--replicas`."""
    group = parser.add_argument_group("routing across replicas")
    if has_replicas:
        group.add_argument(
            "--replicas",
            type=int,
            default=1,
            metavar="N",
            help="servers side by side, at most 1024 (default: 1)",
        )
    group.add_argument(
        "--router", choices=_ROUTERS, default="round_robin", help="default: %(default)s"
    )
    group.add_argument(
        "--load-signal",
        choices=_SIGNALS,
        help="not round_robin: what of its unfinished requests is a replica's load: their number,"
        " or the tokens of their prompts (default: requests)",
    )
    group.add_argument(
        "--load-signal-delay-s",
        type=float,
        metavar="S",
        help="not round_robin: how old the router's knowledge of loads is (default: 0)",
    )
    group.add_argument(
        "--overload-factor",
        type=float,
        metavar="X",
        help="prefix_aware: overloaded is a replica above X times the least load... (default: 1.5)",
    )
    group.add_argument(
        "--overload-slack",
        type=int,
        metavar="N",
        help="... and more than N above it (default: 8 requests, 16384 tokens)",
    )
    group.add_argument(
        "--min-prefix-share",
        type=float,
        metavar="X",
        help="prefix_aware: part of a prompt that a known prefix must be to count (default: 0.3)",
    )
    group.add_argument(
        "--max-index-tokens",
        type=int,
        metavar="N",
        help="prefix_aware: prompt tokens remembered of each replica (default: what its KV memory"
        " holds)",
    )


def routing_of(args: argparse.Namespace) -> "RoutingConfig":
    """The router that the flags name. Raises UsageError."""
    from penstock.tools.simulation.load_signal import LoadSignal
    from penstock.tools.simulation.routing import RouterKind, RoutingConfig

    given: dict[str, Any] = {
        name: getattr(args, name)
        for names in _MEANT_FOR.values()
        for name in names
        if getattr(args, name) is not None
    }
    if "load_signal" in given:
        given["load_signal"] = LoadSignal(given["load_signal"])
    try:
        return RoutingConfig(router=RouterKind(args.router), **given)
    except ValueError as error:
        raise UsageError(told_by_flag(str(error))) from error


def refuse_routing_for_others(args: argparse.Namespace, routers: "Collection[RouterKind]") -> None:
    """Raise UsageError for a flag that none of these routers, which are used, takes."""
    for meant_for, names in _MEANT_FOR.items():
        if not any(router.value in meant_for for router in routers):
            for name in names:
                if getattr(args, name) is not None:
                    used = ", ".join(sorted(router.value for router in routers))
                    flag = f"--{name.replace('_', '-')}"
                    raise UsageError(f"{flag} means nothing to the router {used}")
