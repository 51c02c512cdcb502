"""Penstock in other languages, behind a gateway and on Ray Serve, in figures.

Sections, all of them by default: conformance, gateway, ray. Each is a benchmark of its own
(everywhere_*.py), with what it needs told there; one whose parts are not installed is told and left
out, and then the whole is no success.

    python benchmarks/everywhere.py [--full] [--sections NAME,...] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import everywhere_conformance
import everywhere_gateway
import everywhere_ray
from report import Check, arguments, print_checks, progress, write_json
from services import RunFailed

SECTIONS: dict[str, Callable[[bool], list[Check]]] = {
    "conformance": lambda _: everywhere_conformance.run(),
    "gateway": lambda is_full: everywhere_gateway.run(is_full=is_full),
    "ray": lambda is_full: everywhere_ray.run(is_full=is_full),
}


def main() -> int:
    """Run what was asked for; 1 if a part could not run."""
    parser = arguments(__doc__)
    parser.add_argument("--sections", default=",".join(SECTIONS), metavar="NAME,...")
    args = parser.parse_args()
    names = args.sections.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    checks: list[Check] = []
    not_run: dict[str, str] = {}
    for name in names:
        progress(f"section {name}")
        try:
            checks += SECTIONS[name](args.full)
        except RunFailed as error:
            not_run[name] = str(error)
    print_checks(checks)
    for name, why in not_run.items():
        print(f"not run: {name}: {why}")
    write_json(args.json, {"not_run": not_run}, checks)
    return 1 if not_run else 0


if __name__ == "__main__":
    sys.exit(main())
