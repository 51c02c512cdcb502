"""`penstock health`: reports whether a service is serving, for health checks of containers."""

import argparse

from penstock.server.cli.command import ExitCode, Subparsers
from penstock.server.cli.connection import add_address_option, run_reporting, seconds
from penstock.server.cli.connection_options import add_connection_options, connect

_DEFAULT_DEADLINE_S = 5.0


def add_parser(subparsers: Subparsers) -> None:
    """Add `health` to the command line."""
    parser = subparsers.add_parser(
        "health",
        help="check whether a service is serving",
        description="Ask grpc.health.v1 once and print the answer; exit 0 only for SERVING.",
    )
    add_address_option(parser)
    add_connection_options(parser)
    parser.add_argument("--service", default="", help="a gRPC service (default: the whole server)")
    parser.add_argument(
        "--deadline",
        type=seconds,
        default=_DEFAULT_DEADLINE_S,
        metavar="SECONDS",
        help=f"give up after this long (default: {_DEFAULT_DEADLINE_S:g})",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    return run_reporting("health", lambda: _check(args))


def _check(args: argparse.Namespace) -> int:
    from penstock.client import HealthStatus

    with connect(args) as client:
        status = client.health(args.service, deadline_s=args.deadline)
    print(status.name)
    return ExitCode.OK if status is HealthStatus.SERVING else ExitCode.FAILED
