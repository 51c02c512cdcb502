"""Twenty of twenty scenarios from every language that runs on this machine.

Owns that one figure for each language. The scenarios, the service and the programs are those of
tests/conformance.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

from report import Check, at_least, print_table

TABLE = Path(__file__).resolve().parents[1] / "tests" / "conformance" / "table.py"
LIMIT_S = 3600.0


def run() -> list[Check]:
    """Run all languages, print what came of each; one check for each that runs here."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "conformance.json"
        # Its exit code says that something failed, which the figures say as well.
        subprocess.run(
            [sys.executable, str(TABLE), "--no-page", "--json", str(file)],
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
        told = cast("dict[str, Any]", json.loads(file.read_text(encoding="utf-8")))
    num_scenarios, languages = int(told["num_scenarios"]), cast("list[Any]", told["languages"])
    rows = [(each["language"], each["num_passed"], each["not_run"]) for each in languages]
    print_table("Conformance", ("language", "passed", "not run"), rows)
    return [
        at_least(
            f"conformance, {each['language']}",
            float(each["num_passed"]),
            float(num_scenarios),
            f"of {num_scenarios} scenarios",
        )
        for each in languages
        if each["results"] or not each["is_well"]
    ]
