"""A program that runs `--help` of benchmarks in this process, without optional packages.

    benchmark_help.py FILE ...

Prints one line of JSON, a list of (file, exit code, output). A traceback counts as code 1,
as it does at a prompt. The packages of the extras are hidden, installed or not: the results are
the same on every machine, and no package has to be loaded.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import traceback
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OPTIONAL = frozenset(
    (
        *("fastapi", "httptools", "uvicorn", "hdrh", "jwt", "matplotlib", "openai", "ray", "rich"),
        *("safetensors", "smg", "smg_grpc_proto", "tensorrt_llm", "torch", "transformers"),
        "opentelemetry.instrumentation",
    )
)


class Missing(MetaPathFinder):
    """An import hook that hides the optional packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def help_of(file: str) -> tuple[int, str]:
    """Return the exit code of `--help` and all it printed."""
    sys.argv = [file, "--help"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0, said.getvalue()
            return 1, f"{said.getvalue()}{end.code}"
        except BaseException:  # reported, as at a prompt
            return 1, f"{said.getvalue()}{traceback.format_exc()}"
    return 0, said.getvalue()


def main() -> None:
    files = sys.argv[1:]
    sys.meta_path.insert(0, Missing())
    print(json.dumps([(file, *help_of(file)) for file in files]))


if __name__ == "__main__":
    main()
