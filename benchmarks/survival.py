"""Measures a service under failures: crashes, hangs, cancels, overload, malformed requests and
abuse.

The parts rejects and abuse are also separate benchmarks (overload.py, abuse.py). The quick run
takes minutes, `--full` almost an hour. docs/tools/survival_table.py writes the table in
docs/figures.md from the JSON.

    python benchmarks/survival.py [--full] [--part NAME]... [--json FILE]
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Coroutine
from typing import Any

import abuse
import overload
import survival_cancels
import survival_kills
from report import Measure, Outcome, arguments, run_parts


def _awaited(part: Callable[[Namespace], Coroutine[Any, Any, Outcome]]) -> Measure:
    return lambda options: asyncio.run(part(options))


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(fronts=1, picture=None)
    parts: dict[str, Measure] = {
        "engine_kill": _awaited(survival_kills.engine_kill),
        "no_replay": _awaited(survival_kills.no_replay),
        "hang": _awaited(survival_kills.hang),
        "front_kill": _awaited(survival_kills.front_kill),
        "drain": _awaited(survival_kills.drain),
        "cancel": _awaited(survival_cancels.cancel),
        "rejects": overload.measure,
        "abuse": abuse.measure,
    }
    run_parts(parser, parts)


if __name__ == "__main__":
    main()
