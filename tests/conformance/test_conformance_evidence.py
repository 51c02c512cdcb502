from __future__ import annotations

import sys

import pytest

from conformance.harness import Harness
from conformance.runs import Run

LIAR = """
import json, sys
for line in sys.stdin:
    if line.split() and line.split()[0] not in ("address", "go"):
        if line.strip() in ("drain", "engine_killed"):
            print(json.dumps({"scenario": line.strip(), "event": "ready"}), flush=True)
        print(json.dumps({"scenario": line.strip(), "outcome": "passed"}), flush=True)
"""


@pytest.mark.parametrize("name", ["deadline", "engine_killed"])
async def test_a_program_that_only_reports_passed_fails(name: str) -> None:
    harness = Harness(evidence_s=0.5)
    async with Run([sys.executable, "-c", LIAR], harness=harness) as run:
        result = await run.ask(name)

    assert result.outcome == "failed"
    assert result.why.startswith("it passed, but at the service there was no 1 × Generate")
