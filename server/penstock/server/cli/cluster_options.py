"""Flags of the commands that simulate several replicas, and what they mean.

Owns how replicas and their router are named on the command line.
"""

import argparse
import math
from typing import TYPE_CHECKING

from penstock.server.cli.connection import UsageError

if TYPE_CHECKING:
    from penstock.server.simulation.routing import RoutingConfig

_ROUTERS = ("round_robin", "least_loaded", "prefix_aware")
_SIGNALS = ("requests", "tokens")


def add_routing_options(parser: argparse.ArgumentParser, *, has_replicas: bool) -> None:
    """Add the flags of the router, and `--replicas`."""
    group = parser.add_argument_group("routing across replicas")
    if has_replicas:
        group.add_argument(
            "--replicas", type=int, default=1, metavar="N", help="servers side by side (default: 1)"
        )
    group.add_argument(
        "--router", choices=_ROUTERS, default="round_robin", help="default: %(default)s"
    )
    group.add_argument(
        "--load-signal",
        choices=_SIGNALS,
        default="requests",
        help="what of its unfinished requests is a replica's load: their number, or the tokens of"
        " their prompts (default: %(default)s)",
    )
    group.add_argument(
        "--load-signal-delay-s",
        type=float,
        default=0.0,
        metavar="S",
        help="how old the router's knowledge of loads is (default: 0)",
    )
    group.add_argument(
        "--overload-factor",
        type=float,
        default=1.5,
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
        default=0.3,
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
    from penstock.server.simulation.load_signal import LoadSignal
    from penstock.server.simulation.routing import RouterKind, RoutingConfig

    if not math.isfinite(args.overload_factor):
        raise UsageError(f"overload_factor must be finite, not {args.overload_factor}")
    try:
        return RoutingConfig(
            router=RouterKind(args.router),
            load_signal=LoadSignal(args.load_signal),
            load_signal_delay_s=args.load_signal_delay_s,
            overload_factor=args.overload_factor,
            overload_slack=args.overload_slack,
            max_index_tokens=args.max_index_tokens,
            min_prefix_share=args.min_prefix_share,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
