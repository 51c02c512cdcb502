"""`penstock health`: reports whether a service is serving, for health checks of containers."""

import argparse
import dataclasses

from penstock.server.cli.command import ExitCode, Subparsers
from penstock.server.cli.connection import add_address_option, run_reporting, seconds
from penstock.server.cli.connection_options import add_connection_options, connect

_DEFAULT_DEADLINE_S = 5.0
_DEFAULT_SERVICE = "penstock.v1.GenerationService"
"""Served on the main port only: the operations port serves grpc.health.v1 too."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the `health` subcommand."""
    parser = subparsers.add_parser(
        "health",
        help="check whether a service is serving",
        description="Ask grpc.health.v1 once and print the answer; exit 0 only for SERVING.",
    )
    add_address_option(parser)
    add_connection_options(parser)
    parser.add_argument(
        "--service",
        default=_DEFAULT_SERVICE,
        help=f'a gRPC service; "" is the whole server (default: {_DEFAULT_SERVICE})',
    )
    parser.add_argument(
        "--deadline",
        type=seconds,
        default=_DEFAULT_DEADLINE_S,
        metavar="SECONDS",
        help=f"give up after this long (default: {_DEFAULT_DEADLINE_S:g})",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    return run_reporting("health", lambda: _check(args))


def _check(args: argparse.Namespace) -> int:
    from penstock.client import HealthStatus, NotFound

    with connect(args) as client:
        try:
            status = client.health(args.service, deadline_s=args.deadline)
        except NotFound as error:
            message = f"no service {args.service} at {args.address}"
            if args.service == _DEFAULT_SERVICE:
                message += ": is it the operations port? `penstock serve` prints both ports"
            raise NotFound(dataclasses.replace(error.failure, message=message)) from error
    print(status.name)
    return ExitCode.OK if status is HealthStatus.SERVING else ExitCode.FAILED
