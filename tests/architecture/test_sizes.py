"""Small files, small functions, no drawer modules: the design asks for a new noun instead."""

from __future__ import annotations

import ast
import pathlib

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
ROOTS = (
    *("protos", "scheduler", "executors", "server", "clients"),
    *("tests", "benchmarks", "deploy", "docs"),
)
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
DRAWERS = {"utils", "util", "helpers", "helper", "common", "base", "misc"}


def written_files() -> list[pathlib.Path]:
    """Every Python file of ours that a person wrote."""
    return [
        path
        for root in ROOTS
        for path in sorted((REPOSITORY / root).rglob("*.py"))
        if not path.stem.endswith(("_pb2", "_pb2_grpc")) and "node_modules" not in path.parts
    ]


def function_lines(source: str) -> dict[str, int]:
    """Lines of each function, without its decorators and its docstring."""
    lines: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            num_docstring_lines = (
                (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
                if docstring is not None
                else 0
            )
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1 - num_docstring_lines
            lines[f"{node.name}:{node.lineno}"] = num_lines
    return lines


def test_files_stay_small() -> None:
    sizes = {
        str(path.relative_to(REPOSITORY)): len(path.read_text(encoding="utf-8").splitlines())
        for path in written_files()
    }

    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_functions_stay_small() -> None:
    too_long = {
        f"{path.relative_to(REPOSITORY)}:{name}": num_lines
        for path in written_files()
        for name, num_lines in function_lines(path.read_text(encoding="utf-8")).items()
        if num_lines > MAX_FUNCTION_LINES
    }

    assert too_long == {}


def test_modules_are_named_for_what_they_own() -> None:
    drawers = [
        str(path.relative_to(REPOSITORY))
        for path in written_files()
        if path.stem in DRAWERS or path.parent.name in DRAWERS
    ]

    assert drawers == []


def test_modules_say_what_they_own() -> None:
    silent = [
        str(path.relative_to(REPOSITORY))
        for path in written_files()
        if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]

    assert silent == []
