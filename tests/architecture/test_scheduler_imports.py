"""The scheduler imports nothing for threads, clocks, files, sockets or event loops, and no
frameworks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock.scheduler

MODULES = sorted(Path(penstock.scheduler.__path__[0]).rglob("*.py"))
ALLOWED = {
    *("bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq", "itertools"),
    *("math", "numbers", "numpy", "penstock.scheduler", "types", "typing", "__future__"),
}


def imports_of(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def is_allowed(name: str) -> bool:
    return any(name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED)


@pytest.mark.parametrize("module", MODULES, ids=[module.stem for module in MODULES])
def test_the_scheduler_imports_only_pure_modules(module: Path) -> None:
    imported = set(imports_of(module.read_text(encoding="utf-8")))

    assert {name for name in imported if not is_allowed(name)} == set()
