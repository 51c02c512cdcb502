"""The packages in `LIGHT` import no heavy modules, so that their processes start fast."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "tensorrt_llm"}
# Packages of the extra `server`, which the client does not need.
SERVER = {"jinja2", "numpy", "opentelemetry", "prometheus_client", "tokenizers"}
# (portion, packages that importing all of its modules must not load)
LIGHT = [
    ("penstock.scheduler", HEAVY | {"grpc", "google.protobuf", "tokenizers", "uvloop"}),
    ("penstock.server.ipc", HEAVY | {"grpc", "google.protobuf", "tokenizers", "uvloop"}),
    ("penstock.server.processes", HEAVY),
    ("penstock.server.rpc", HEAVY),
    ("penstock.server.text", HEAVY),
    ("penstock.server.front", HEAVY),
    ("penstock.server.cli", HEAVY),
    # The help of `penstock serve` needs no more than numpy.
    ("penstock.server.config", HEAVY | SERVER - {"numpy"} | {"grpc", "msgspec"}),
    ("penstock.tools", HEAVY),
    # It imports the engine's package only when an engine is built.
    ("penstock.executor.trtllm", HEAVY),
    ("penstock.client", HEAVY | SERVER),
]


def modules_below(package: str) -> list[str]:
    path = getattr(importlib.import_module(package), "__path__", ())
    return [package, *(module.name for module in pkgutil.walk_packages(path, f"{package}."))]


@pytest.mark.parametrize(("package", "unwanted"), LIGHT, ids=[package for package, _ in LIGHT])
def test_package_loads_nothing_heavy(package: str, unwanted: set[str]) -> None:
    program = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps(sorted(set(json.loads(sys.argv[2])) & set(sys.modules))))"
    )
    arguments = [json.dumps(modules_below(package)), json.dumps(sorted(unwanted))]

    loaded = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    ).stdout

    assert json.loads(loaded) == []


@pytest.mark.parametrize(
    ("arguments", "installed", "package"),
    [
        (["--version"], set[str](), "penstock.client"),
        (["bench", "--help"], {"hdrh", "msgspec", "numpy"}, "penstock.tools.bench"),
    ],
    ids=["client", "bench"],
)
def test_the_program_imports_no_package_of_another_extra(
    arguments: list[str], installed: set[str], package: str
) -> None:
    absent = SERVER | HEAVY | {"grpc_channelz", "grpc_reflection", "msgspec", "rich", "uvloop"}
    absent = (absent | {"hdrh", "matplotlib"}) - installed
    program = (
        "import importlib, json, sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in json.loads(sys.argv[1]):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "for name in json.loads(sys.argv[2]): importlib.import_module(name)\n"
        "from penstock.tools.command_line import main\n"
        "sys.exit(main(json.loads(sys.argv[3])))"
    )
    names = (sorted(absent), modules_below(package), arguments)

    ended = subprocess.run(
        [sys.executable, "-c", program, *map(json.dumps, names)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, "")
