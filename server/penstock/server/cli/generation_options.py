"""The options that `generate` and `chat` share.

Defines the flags. The server checks ranges and names the invalid field.
"""

import argparse
from typing import TYPE_CHECKING

from penstock.server.cli.connection import add_address_option, seconds
from penstock.server.cli.connection_options import add_connection_options

if TYPE_CHECKING:
    from penstock.client import Constraint, GenerationOptions


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a generation. Without a flag, the default of the server applies."""
    add_address_option(parser)
    add_connection_options(parser)
    parser.add_argument("--model", help="name of the model (default: the server's)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens of an output (default: the server's --default-max-tokens)",
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: 1)")
    parser.add_argument("--top-p", type=float, metavar="P", help="in (0, 1] (default: 1)")
    parser.add_argument("--top-k", type=int, metavar="K", help="at least 1 (default: all tokens)")
    parser.add_argument(
        "--seed", type=int, metavar="SEED", help="makes the output reproducible (default: random)"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop string: the output ends before it; repeatable (default: none)",
    )
    parser.add_argument("--adapter", metavar="NAME", help="an adapter of the model (default: none)")
    _add_constraint_options(parser)
    parser.add_argument(
        "--priority", type=int, metavar="P", help="higher is more urgent (default: 0)"
    )
    parser.add_argument(
        "--deadline",
        type=seconds,
        metavar="SECONDS",
        help="fail if it takes longer (default: the server's --default-deadline-s)",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        metavar="SECONDS",
        help="end after this time, with the text so far (default: no limit)",
    )


def options_of(args: argparse.Namespace) -> "GenerationOptions":
    """Return the generation options, keyed by the name of the client's argument. The value is None
    if the flag is not given; for `stop` it is an empty list."""
    from penstock.client import Adapter

    return {
        "model": args.model,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": args.seed,
        "stop": args.stop,
        "constraint": _constraint_of(args),
        "adapter": None if args.adapter is None else Adapter(name=args.adapter),
        "priority": args.priority,
        "time_limit_s": args.time_limit,
    }


def _add_constraint_options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--json-schema",
        metavar="JSON",
        help='the output conforms to this JSON schema; of a file: "$(cat FILE)"',
    )
    kinds.add_argument("--regex", metavar="PATTERN", help="the output matches it")
    kinds.add_argument("--grammar", metavar="EBNF", help="the output conforms to it")
    kinds.add_argument(
        "--choice",
        action="append",
        metavar="TEXT",
        help="the output is one of these texts; repeatable",
    )


def _constraint_of(args: argparse.Namespace) -> "Constraint | None":
    from penstock.client import (
        ChoiceConstraint,
        GrammarConstraint,
        JsonSchemaConstraint,
        RegexConstraint,
    )

    if args.json_schema is not None:
        return JsonSchemaConstraint(schema=args.json_schema)
    if args.regex is not None:
        return RegexConstraint(pattern=args.regex)
    if args.grammar is not None:
        return GrammarConstraint(ebnf=args.grammar)
    return None if args.choice is None else ChoiceConstraint(choices=tuple(args.choice))
