"""`penstock models`: lists the served models and their limits."""

import argparse
from typing import TYPE_CHECKING

from penstock.server.cli.command import ExitCode, Subparsers
from penstock.server.cli.connection import add_address_option, run_reporting
from penstock.server.cli.connection_options import add_connection_options, connect
from penstock.server.cli.report import table_lines, value_json

if TYPE_CHECKING:
    from penstock.client import Model


def add_parser(subparsers: Subparsers) -> None:
    """Add the `models` subcommand."""
    parser = subparsers.add_parser(
        "models",
        help="list the models of a service",
    )
    add_address_option(parser)
    add_connection_options(parser)
    parser.add_argument(
        "--json", action="store_true", help="one line of JSON for each model, with all limits"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    return run_reporting("models", lambda: _list_models(args))


def _list_models(args: argparse.Namespace) -> int:
    with connect(args) as client:
        models = client.list_models()
    if args.json:
        for model in models:
            print(value_json(model, features=dict(model.features)))
    else:
        print("\n".join(table_lines([_HEADER, *(_row(model) for model in models)])))
    return ExitCode.OK


_HEADER = ("MODEL", "STATE", "EXECUTOR", "CONTEXT", "VOCABULARY", "DEFAULT", "ALIASES", "ADAPTERS")


def _row(model: "Model") -> tuple[str, ...]:
    return (
        model.name,
        model.state.name.lower(),
        model.executor,
        _number(model.limits.max_total_tokens),
        _number(model.limits.vocab_size),
        "yes" if model.is_default else "",
        " ".join(model.aliases),
        " ".join(model.adapters),
    )


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
