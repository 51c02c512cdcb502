"""A soak of a real service: `python tests/chaos/soak.py --minutes 5`, or `--full` for two hours.

Load, bursts, cancels, slow readers and poison, while processes are stopped and killed; see
docs/survival-cases.md, case 48. Exit code 0 when every gate held, 1 when one did not.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FULL_MINUTES = 120.0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Stop and kill a service under load.")
    parser.add_argument("--minutes", type=float, help="how long (default: 5, with --full 120)")
    parser.add_argument("--full", action="store_true", help="64 streams, bursts of 256")
    parser.add_argument("--torch", action="store_true", help="the demo model, not the simulated")
    parser.add_argument("--seed", type=int, default=1, help="of load and strikes (default: 1)")
    options = parser.parse_args()
    if options.minutes is not None and not 0.25 <= options.minutes <= 24 * 60:
        parser.error(f"--minutes must be 0.25 to 1440, not {options.minutes:g}")
    return options


def main() -> int:
    """Run the soak and print the report; return 0 if all gates held."""
    options = parsed()
    sys.path.insert(0, str(TESTS))
    from support.soak_plan import SoakPlan, full_plan
    from support.soak_run import as_text, run_soak

    minutes = options.minutes or (FULL_MINUTES if options.full else 5.0)
    plan = (
        full_plan(options.seed, minutes, is_torch=options.torch)
        if options.full
        else SoakPlan(seconds=minutes * 60, seed=options.seed, is_torch=options.torch)
    )
    result = asyncio.run(run_soak(plan, lambda line: print(line, file=sys.stderr, flush=True)))
    print(as_text(result))
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
