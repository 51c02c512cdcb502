"""Runs the tests of the CPU kernels on a build with GCC's sanitizers for memory accesses, undefined
behaviour and conversions of floats that do not fit.

The first error ends the run and reports the source line. Loads and stores of AMX tiles are inline
assembly, which the sanitizers do not see: `guard_pages.py` checks them.

    python tests/sanitize/kernels.py [ARGUMENT ...]        arguments for pytest

As a plugin of pytest, this module makes the tests load that build.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "build/sanitized/_kernels.so"
FLAGS = (
    *("-O1", "-g1", "-fno-omit-frame-pointer"),
    "-fsanitize=address,undefined,float-cast-overflow",
)
RUNTIMES = ("libasan.so", "libubsan.so")
TESTS = (
    "tests/property/test_cpu_kernel_shapes.py",
    *(
        f"tests/unit/executor/test_{name}.py"
        for name in ("cpu_kernels", "cpu_int8", "native_decoder", "native_sampling")
    ),
)


def pytest_configure() -> None:
    """Set the path of the sanitized build before any test loads the kernels."""
    from penstock.executor.torch.cpu_kernels import native

    native._LIBRARY = LIBRARY


def _compile() -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", REPOSITORY / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    hook.compile_kernels(LIBRARY, FLAGS)


def _runtime(name: str) -> str:
    compiler = os.environ.get("CC", "gcc")
    command = [compiler, f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Compile the kernels, and run their tests in a process that preloads the sanitizers; return
    its exit code.
    """
    _compile()
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(map(_runtime, RUNTIMES)),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, at its end
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONPATH": str(REPOSITORY / "tests"),
    }
    # A report is written to the process's own stderr, which pytest must not capture.
    options = ("-p", "sanitize.kernels", "--capture=sys", *TESTS, *sys.argv[1:])
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
