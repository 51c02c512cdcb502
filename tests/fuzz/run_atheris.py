"""Fuzz the decoders of untrusted bytes with atheris, guided by branch coverage.

    python tests/fuzz/run_atheris.py [--seconds 600] [--target read_request ...] [--keep FOLDER]

Each target gets an equal part of the time, in a separate process. The exit code is 1 if one raised
an unexpected error; the input is then printed and stored in the folder. Requires the extra `fuzz`.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
_MAX_BYTES = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all targets together")
    parser.add_argument("--target", action="append", help="one of the targets (default: all)")
    parser.add_argument("--keep", type=Path, help="folder for the corpora and what was found")
    parser.add_argument("--search", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(_TESTS))
    if args.search:
        return _search(args.search, args.seconds, args.keep)
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        return _search_all(args.target, args.seconds, args.keep or Path(folder))


def _search_all(names: list[str] | None, seconds: float, folder: Path) -> int:
    from fuzz.targets import TARGETS, corpus

    names = names or list(TARGETS)
    broken: list[str] = []
    for name in names:
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for index, data in enumerate(corpus(name)):
            (place / f"seed-{index}").write_bytes(data)
        share = ("--seconds", str(seconds / len(names)), "--keep", str(place), "--search", name)
        done = subprocess.run([sys.executable, __file__, *share], check=False)
        print(f"{name}: {'broken' if done.returncode else 'held'}", flush=True)
        broken += [name] if done.returncode else []
    return 1 if broken else 0


def _search(name: str, seconds: float, folder: Path) -> int:
    atheris: Any = importlib.import_module("atheris")

    with atheris.instrument_imports(include=["penstock"]):
        from fuzz.targets import TARGETS

    options = (
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={_MAX_BYTES}",
        f"-artifact_prefix={folder}/found-",
        "-timeout=10",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
    )
    atheris.Setup([sys.argv[0], *options, str(folder)], TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
