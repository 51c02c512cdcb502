"""Lists the client languages, and finds and builds the conformance program of each.

Defines which tools a language requires on the machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD_S = 900.0
_VERSION_S = 20.0
_NUM_KEPT_LINES = 15
_VERSION = re.compile(r"\d+(?:\.\d+)+")


class NotBuilt(Exception):
    """A program could not be built. The message has the end of the build's output or the exceeded
    time limit.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library that a build requires on the machine: it is installed if `path` exists."""

    package: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The name of a component, and the command that prints its version."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """One language: its folder in clients/, and what its program and its build require.

    `runtime`: executables required to run the program; `tools` and `libraries`: required to build
    it, unless its `output` exists. `template`: there is no client, only this template that
    generates stubs.
    """

    name: str
    folder: str = ""
    runtime: tuple[str, ...] = ("make",)
    tools: tuple[str, ...] = ()
    libraries: tuple[Library, ...] = ()
    output: str = ""
    versions: tuple[Version, ...] = ()
    template: str = ""

    @property
    def path(self) -> Path:
        return REPOSITORY / "clients" / self.folder

    def why_not(self) -> str:
        """Return why the language's program cannot run on this machine; "" if it can."""
        if self.template:
            return f"stubs only, from {self.template}"
        if self.folder and not (self.path / "Makefile").is_file():
            return f"needs clients/{self.folder}/Makefile"
        missing = [tool for tool in self.runtime if shutil.which(tool) is None]
        if not (self.output and (self.path / self.output).exists()):
            missing += [tool for tool in self.tools if shutil.which(tool) is None]
            missing += [each.package for each in self.libraries if not Path(each.path).exists()]
        return f"needs {', '.join(missing)}" if missing else ""

    def command(self) -> list[str]:
        """Build the program if necessary; return its command. Raises NotBuilt."""
        if not self.folder:
            return [sys.executable, str(Path(__file__).with_name("python_program.py"))]
        try:
            built = subprocess.run(
                ["make", "--silent", "--no-print-directory", "-C", str(self.path), "program"],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=BUILD_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NotBuilt(f"its build took more than {BUILD_S:.0f} s") from None
        lines = built.stdout.splitlines()
        if built.returncode or len(lines) != 1:
            ended = built.stderr.splitlines()[-_NUM_KEPT_LINES:] + lines[-1:]
            raise NotBuilt(f"make program ended with {built.returncode}: " + " | ".join(ended))
        return shlex.split(lines[0])

    def installed_versions(self) -> str:
        """Return the versions of the language's tools and libraries, as far as they report one."""
        if not self.folder:
            grpc = importlib.metadata.version("grpcio")
            return f"Python {platform.python_version()}, grpcio {grpc}"
        report = [
            (each.name, _installed_version(each.command, self.path)) for each in self.versions
        ]
        return ", ".join(f"{name} {version}" for name, version in report if version)


def _environment() -> dict[str, str]:
    """Return this process's environment for a build, with this Python in PYTHON and without the
    variables of make. With these variables, make's warnings would be mixed with the output.
    """
    report = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return {**report, "PYTHON": sys.executable}


def _installed_version(command: tuple[str, ...], folder: Path) -> str:
    """Return the first version number in the output of a command; "" if there is none or the
    command fails.
    """
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = _VERSION.search(ended.stdout + ended.stderr)
    return found.group() if found and not ended.returncode else ""


def _of_debian(package: str) -> tuple[str, ...]:
    return ("dpkg-query", "--show", "--showformat=${Version}", package)


PYTHON = Language(name="Python", runtime=())
TYPESCRIPT = Language(
    name="TypeScript",
    folder="typescript",
    runtime=("make", "node"),
    tools=("npm",),
    output="dist/conformance/main.js",
    versions=(
        Version(name="Node.js", command=("node", "--version")),
        Version(
            name="grpc-js",
            command=("node", "-p", "require('@grpc/grpc-js/package.json').version"),
        ),
    ),
)
CPP = Language(
    name="C++",
    folder="cpp",
    tools=("cmake", "c++", "protoc", "grpc_cpp_plugin"),
    libraries=(Library(package="libgrpc++-dev", path="/usr/include/grpcpp/grpcpp.h"),),
    output="build/conformance",
    versions=(
        Version(name="c++", command=("c++", "-dumpfullversion")),
        Version(name="gRPC", command=_of_debian("libgrpc++-dev")),
    ),
)
GO = Language(
    name="Go",
    folder="go",
    tools=("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
    libraries=(
        Library(
            package="golang-google-grpc-dev",
            path="/usr/share/gocode/src/google.golang.org/grpc",
        ),
        Library(
            package="golang-github-golang-protobuf-1-5-dev",
            path="/usr/share/gocode/src/google.golang.org/protobuf",
        ),
    ),
    output="build/conformance",
    versions=(
        Version(name="Go", command=("go", "version")),
        Version(name="grpc-go", command=_of_debian("golang-google-grpc-dev")),
    ),
)
JAVA = Language(
    name="Java",
    folder="java",
    runtime=("make", "java"),
    tools=("javac", "protoc", "grpc_java_plugin"),
    libraries=(
        Library(package="libgrpc-java", path="/usr/share/java/grpc-core.jar"),
        Library(package="libnetty-java", path="/usr/share/java/netty-handler.jar"),
        Library(
            package="libgoogle-common-protos-java",
            path="/usr/share/java/proto-google-common-protos.jar",
        ),
    ),
    output="build/conformance",
    versions=(
        Version(name="Java", command=("javac", "-version")),
        Version(name="grpc-java", command=_of_debian("libgrpc-java")),
    ),
)

LANGUAGES = (
    PYTHON,
    TYPESCRIPT,
    CPP,
    GO,
    JAVA,
    Language(name="Rust", template="protos/templates/buf.gen.rust.yaml"),
    Language(name="C#", template="protos/templates/buf.gen.csharp.yaml"),
    Language(name="Swift", template="protos/templates/buf.gen.swift.yaml"),
)
RUNNABLE = tuple(language for language in LANGUAGES if not language.template)
