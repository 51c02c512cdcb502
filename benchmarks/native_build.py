"""Compiles the C++ programs of the benchmarks when they are needed and have changed.

Contains the compiler's command lines and manages the cache of programs (in XDG_CACHE_HOME, named
after a hash of the sources). Needs g++; the gRPC server also protoc, its C++ plugin and libgrpc++
(Debian: `apt-get install g++ protobuf-compiler-grpc libgrpc++-dev`).
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from report import RunFailed

_HERE = Path(__file__).resolve().parent / "native"
_PROTOS = Path(__file__).resolve().parent.parent / "protos"
_FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra")
_CONTRACT = (
    "google/rpc/status",
    *(
        f"penstock/v1/{part}"
        for part in ("error", "generation_service", "options", "output", "prompt", "state")
    ),
)
_COMPILE_S = 600.0


class CannotBuild(RunFailed):
    """A program cannot be built on this machine; the message contains the missing part or the
    compiler's errors.
    """


def load_client() -> Path:
    """Build the load client; return its path. Raises CannotBuild, for example without g++."""
    return _built("load_client", (), ())


def grpc_server() -> Path:
    """Build the C++ server; return its path. Raises CannotBuild, for example without gRPC's C++
    library.
    """
    for tool in ("protoc", "grpc_cpp_plugin", "pkg-config"):
        if shutil.which(tool) is None:
            raise CannotBuild(f"{tool} is not installed")
    asked = ["pkg-config", "--cflags", "--libs", "grpc++", "protobuf"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise CannotBuild("libgrpc++ is not installed (libgrpc++-dev)")
    return _built("grpc_server", _CONTRACT, tuple(found.stdout.split()))


def _built(name: str, contract: tuple[str, ...], libraries: tuple[str, ...]) -> Path:
    if shutil.which("g++") is None:
        raise CannotBuild("g++ is not installed: the load client of this benchmark is C++")
    main = _HERE / f"{name}.cpp"
    protos = [_PROTOS / f"{part}.proto" for part in contract]
    program = _cache() / f"{name}-{_digest([main, *sorted(_HERE.glob('*.hpp')), *protos])}"
    if program.exists():
        return program
    with tempfile.TemporaryDirectory(prefix="penstock-build-") as folder:
        work = Path(folder)
        _generate(protos, work)
        made = work / "program"
        generated = [str(path) for path in sorted(work.rglob("*.cc"))]
        _run("g++", *_FLAGS, f"-I{work}", "-o", str(made), str(main), *generated, *libraries)
        # Two concurrent runs may both compile; either program is valid.
        shutil.copy(made, program.with_suffix(f".{os.getpid()}"))
        program.with_suffix(f".{os.getpid()}").replace(program)
    return program


def _generate(protos: list[Path], work: Path) -> None:
    if not protos:
        return
    plugin = f"--plugin=protoc-gen-grpc={shutil.which('grpc_cpp_plugin')}"
    outs = (f"--cpp_out={work}", f"--grpc_out={work}")
    _run("protoc", f"-I{_PROTOS}", plugin, *outs, *map(str, protos))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_S)
    if done.returncode != 0:
        raise CannotBuild(f"{command[0]} failed:\n{done.stderr[-2000:]}")


def _digest(sources: list[Path]) -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "penstock-benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
