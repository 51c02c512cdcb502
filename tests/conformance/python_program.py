"""The conformance program of the Python client; README.md next to this file specifies its protocol.

Reads and writes the lines of the protocol; other modules contain the scenarios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conformance.python_scenario import Check

TESTS = Path(__file__).resolve().parents[1]
SCENARIO_S = 60.0


def write_line(line: Mapping[str, str]) -> None:
    print(json.dumps(line), flush=True)


async def next_line() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


async def outcome(name: str, check: Check | None, address: str) -> dict[str, str]:
    """Run the scenario `name`; return its result line as a dictionary. `check`: None if the program
    has no such scenario.
    """
    from conformance.python_scenario import ExpectationFailed, ScenarioInput
    from penstock.client import PenstockError

    async def until_go() -> None:
        write_line({"scenario": name, "event": "ready"})
        line = await next_line()
        if line.strip() != "go":
            raise ExpectationFailed(f"expected go, not {line!r}")

    def ready() -> None:
        write_line({"scenario": name, "event": "ready"})

    def failed(why: str) -> dict[str, str]:
        return {"scenario": name, "outcome": "failed", "why": why}

    if check is None:
        return failed("no such scenario")
    try:
        async with asyncio.timeout(SCENARIO_S):
            await check(ScenarioInput(address=address, ready=ready, until_go=until_go))
    except (ExpectationFailed, PenstockError) as error:
        return failed(str(error))
    except TimeoutError:
        return failed(f"not done within {SCENARIO_S:.0f} s")
    except Exception as error:  # a fault of this program fails its scenario alone
        return failed(f"{type(error).__name__}: {error}")
    return {"scenario": name, "outcome": "passed"}


async def serve_stdin(address: str) -> None:
    """Run the scenario that each line of stdin names, until stdin ends; a line `address HOST:PORT`
    changes the address of the service.
    """
    from conformance import python_answers, python_rejections, python_request_ends

    checks: dict[str, Check] = {
        **python_answers.CHECKS,
        **python_rejections.CHECKS,
        **python_request_ends.CHECKS,
    }
    while line := await next_line():
        word, _, rest = line.strip().partition(" ")
        if word == "address":
            address = rest
        elif word:
            write_line(await outcome(word, checks.get(word), address))


def main() -> None:
    sys.path.insert(0, str(TESTS))
    parser = argparse.ArgumentParser(description="The conformance program of the Python client.")
    parser.add_argument("--address", required=True, metavar="HOST:PORT")
    asyncio.run(serve_stdin(parser.parse_args().address))


if __name__ == "__main__":
    main()
