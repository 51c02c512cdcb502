"""Build hook: compiles the CPU kernels into the package, for wheels and editable installs.

Without a C compiler, or with one that cannot compile them, the package is built without kernels,
and the executor uses only PyTorch's operators.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path(__file__).resolve().parent / "executors/penstock/executor/torch/cpu_kernels"
_CSRC = _FOLDER / "csrc"
_TARGET = _FOLDER / "_kernels.so"
_SOURCES = (
    *("attention.c", "elementwise.c", "layers.c", "packed_linear.c", "page_write.c"),
    "sampling.c",
)
_FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_X86_SETS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
"""Compiler flags of each instruction set; the baseline needs none."""


class CustomBuildHook(BuildHookInterface[Any]):
    """Hatchling build hook: adds the shared object to the wheel, and the platform to its tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        try:
            # A wheel is always compiled. An editable install reuses kernels that are up to date.
            if version == "standard" or not is_built(_TARGET):
                self.app.display_info("compiling the CPU kernels")
                compile_kernels(_TARGET)
        except (OSError, subprocess.CalledProcessError) as error:
            if version == "standard":
                _TARGET.unlink(missing_ok=True)  # otherwise the wheel would contain the old one
            self.app.display_warning(_failure(error))
            return
        machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{machine}"


def source_digest() -> str:
    """Return a digest of the sources and of this file, because this file has the compiler flags."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted(_CSRC.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def is_built(target: Path) -> bool:
    """Return whether the shared object was compiled from these sources by this compiler, on this
    kind of machine.

    Raises OSError or CalledProcessError if the file exists and there is no working compiler.
    """
    return target.is_file() and _stamp(_find_compiler()).encode() in target.read_bytes()


def _stamp(compiler: str, flags: Sequence[str] = ()) -> str:
    """Return the stamp of the shared object: digests of the sources and of the environment."""
    command = [*shlex.split(compiler), "--version"]
    version = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    environment = (compiler, version, *flags, platform.machine(), *platform.libc_ver())
    return f"{source_digest()}-{hashlib.sha256(repr(environment).encode()).hexdigest()[:16]}"


def _find_compiler() -> str:
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "cc")), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler (gcc or cc)")
    return compiler


def compile_kernels(
    target: Path = _TARGET, flags: Sequence[str] = (), report: Callable[[str], None] | None = None
) -> None:
    """Write the shared object, compiled and linked with additional `flags`; call `report` with a
    line for each object file.

    Raises OSError or CalledProcessError; then an existing shared object is not replaced.
    """
    compiler = _find_compiler()
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    sets = {"baseline": (), **(_X86_SETS if is_x86 else {})}
    common = [*_FLAGS, *flags]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        commands = [
            [*common, f"-DINSTRUCTIONS={name}", *own, "-c", source, "-o", f"{name}-{source}.o"]
            for name, own in sets.items()
            for source in _SOURCES
        ]
        stamp = f'-DSOURCE_DIGEST="{_stamp(compiler, flags)}"'
        commands.append([*common, stamp, "-c", "support.c", "-o", "support.o"])
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for number, name in enumerate(
                pool.map(partial(_compile, compiler, Path(folder)), commands), 1
            ):
                if report is not None:
                    report(f"[{number:2}/{len(commands)}] {name}")
        # Without -fopenmp: OpenMP's functions are resolved in the runtime that torch has loaded,
        # whatever its file name, so that there is only one thread pool.
        objects = [path.name for path in Path(folder).glob("*.o")]
        _compile(compiler, Path(folder), ["-shared", *flags, *objects, "-lm", "-o", "kernels.so"])
        made = Path(folder, "kernels.so")
        if b"__kmpc_fork_call" in made.read_bytes():
            raise OSError("compiled for LLVM's OpenMP, which torch does not contain: set CC=gcc")
        made.replace(target)


def _compile(compiler: str, folder: Path, arguments: list[str]) -> str:
    """Run the compiler in `folder`; names of C sources are converted to paths. Return the name of
    the output, the last argument."""
    completed = [str(_CSRC / name) if name.endswith(".c") else name for name in arguments]
    command = [*shlex.split(compiler), *completed]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return arguments[-1]


def main() -> int:
    """Compile what is not up to date and print each object file; return 1 after an error."""
    try:
        if not is_built(_TARGET):
            compile_kernels(report=partial(print, flush=True))
    except (OSError, subprocess.CalledProcessError) as error:
        print(_failure(error), file=sys.stderr)
        return 1
    return 0


def _failure(error: OSError | subprocess.CalledProcessError) -> str:
    return f"the CPU kernels are not built: {getattr(error, 'stderr', None) or error}"


if __name__ == "__main__":
    raise SystemExit(main())
