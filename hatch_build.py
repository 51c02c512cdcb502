"""Build hook: compiles the CPU kernels into the package, for wheels and editable installs.

Owns the compiler's command lines. Without a C compiler, or with one that cannot compile them, the
package is built without kernels and the executor computes with PyTorch's operators alone.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
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
"""Flags of each instruction set; the baseline needs none."""


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the shared object, and the platform to the wheel's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        try:
            compile_kernels()
        except (OSError, subprocess.CalledProcessError) as error:
            if version == "standard":
                _TARGET.unlink(missing_ok=True)  # which the wheel would ship
            detail = getattr(error, "stderr", None) or error
            self.app.display_warning(f"CPU kernels are not built: {detail}")
            return
        machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{machine}"


def source_digest() -> str:
    """Of all that is compiled, and how; the shared object carries it."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted(_CSRC.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def compile_kernels(target: Path = _TARGET, flags: Sequence[str] = ()) -> None:
    """Write the shared object, compiled and linked with additional `flags`.

    Raises OSError or CalledProcessError; an old one stays then.
    """
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "cc")), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler (gcc or cc)")
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    sets = {"baseline": (), **(_X86_SETS if is_x86 else {})}
    common = [*_FLAGS, *flags]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        commands = [
            [*common, f"-DINSTRUCTIONS={name}", *own, "-c", source, "-o", f"{name}-{source}.o"]
            for name, own in sets.items()
            for source in _SOURCES
        ]
        digest = f'-DSOURCE_DIGEST="{source_digest()}"'
        commands.append([*common, digest, "-c", "support.c", "-o", "support.o"])
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(partial(_compile, compiler, Path(folder)), commands))
        # Not with -fopenmp: its functions are found in the runtime that torch has loaded, whatever
        # the name of its file, so that there is one pool of threads.
        objects = [path.name for path in Path(folder).glob("*.o")]
        _compile(compiler, Path(folder), ["-shared", *flags, *objects, "-lm", "-o", "kernels.so"])
        made = Path(folder, "kernels.so")
        if b"__kmpc_fork_call" in made.read_bytes():
            raise OSError("compiled for LLVM's OpenMP, which torch does not bring: set CC=gcc")
        made.replace(target)


def _compile(compiler: str, folder: Path, arguments: list[str]) -> None:
    """Run in `folder`; names of sources are completed."""
    completed = [str(_CSRC / name) if name.endswith(".c") else name for name in arguments]
    command = [*shlex.split(compiler), *completed]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    compile_kernels()
