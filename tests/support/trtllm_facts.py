"""The recorded table of TensorRT-LLM's API, and the part that given code uses.

Reads the table and walks source text. Imports neither the package nor its stand-in.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.executor.trtllm.source_check import load_facts

ROOT = "tensorrt_llm"
_WORD = re.compile(r"[A-Za-z_]\w*")
_FLAG = re.compile(r"--\w+")
_FOREIGN_CLASS = re.compile(r"[A-Z]\w*(Config|Policy|Params|Request|Sampler|Args)")
_MODULE_NAMES = {"root": ROOT, "llmapi": f"{ROOT}.llmapi"}
"""Names of variables that hold the package's modules."""


@cache
def facts() -> dict[str, Any]:
    """Return the table of release 1.2 with the additions of 1.3, marked as such."""
    table = load_facts()
    _mark_later(table["classes"], load_facts("1.3")["classes"])
    return table


def _mark_later(known: dict[str, Any], later: dict[str, Any]) -> None:
    for name, entry in later.items():
        if name not in known:
            known[name] = {**entry, "since": "1.3"}
        elif isinstance(entry, dict) and "default" not in entry:
            _mark_later(known[name], entry)


def class_path(name: str) -> str | None:
    """Return the table's path of a class by its bare name; the shortest if there are several."""
    paths = [path for path in facts()["classes"] if path.rpartition(".")[2] == name]
    return min(paths, key=len) if paths else None


def members_of(path: str) -> set[str]:
    """Return fields, attributes, methods and enum members of a class."""
    found = facts()["classes"][path]
    return {
        *found.get("fields", {}),
        *found.get("attributes", {}),
        *found.get("methods", {}),
        *found.get("members", ()),
    }


def parameters_of(path: str) -> set[str]:
    found = facts()["classes"][path]
    made = found.get("methods", {}).get("__init__", {})
    more = made.get("takes_more")
    return {
        *found.get("fields", {}),
        *made.get("parameters", {}),
        *(parameters_of(more) if more else ()),
    }


def all_names() -> set[str]:
    """Return every field, parameter, attribute, method, class and module-level name of the
    table.
    """
    table = facts()
    names = {name for module in table["modules"].values() for name in module["names"]}
    for path, found in table["classes"].items():
        names |= members_of(path) | {path.rpartition(".")[2]}
        for method in found.get("methods", {}).values():
            names |= set(method["parameters"])
    return names


def statistics_keys() -> set[str]:
    """Return every key of every part of an iteration's statistics."""
    return {key for part in facts()["statistics"].values() for key in part["keys"]}


def words_of(source: str) -> set[str]:
    """Return the string constants that look like names, without docstrings."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in prose
        and _WORD.fullmatch(node.value)
    }


def flags_of(source: str) -> set[str]:
    """Return the command-line flags among the string constants, without dashes."""
    return {
        node.value[2:]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _FLAG.fullmatch(node.value)
    }


def foreign_class_names(source: str) -> set[str]:
    """Return the string constants that name a class of settings or parameters."""
    return {word for word in words_of(source) if _FOREIGN_CLASS.fullmatch(word)}


@dataclass(frozen=True, slots=True)
class Use:
    """A name that code takes from a module or class of the package, and its line."""

    owner: str
    name: str
    line: int

    @property
    def is_recorded(self) -> bool:
        modules, classes = facts()["modules"], facts()["classes"]
        if not self.name:
            return self.owner in modules
        if self.owner in modules:
            return (
                self.name in modules[self.owner]["names"] or f"{self.owner}.{self.name}" in modules
            )
        return self.owner in classes and self.name in members_of(self.owner)


class _Uses(ast.NodeVisitor):
    """Follows modules and classes of the package through assignments of one name."""

    def __init__(self) -> None:
        self.found: list[Use] = []
        self._owners = dict(_MODULE_NAMES)

    def owner_of(self, node: ast.expr) -> str | None:
        """Return the module or class that an expression refers to."""
        if isinstance(node, ast.Name):
            return self._owners.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.owner_of(node.value)
            return None if owner is None else _class_in(owner, node.attr)
        return self._owner_of_call(node) if isinstance(node, ast.Call) else None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == ROOT:
                self.found.append(Use(alias.name, "", node.lineno))
                self._owners[alias.asname or alias.name] = alias.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if module.split(".")[0] != ROOT:
            return
        for alias in node.names:
            self.found.append(Use(module, alias.name, node.lineno))
            path = _class_in(module, alias.name)
            if path is not None:
                self._owners[alias.asname or alias.name] = path

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self.owner_of(node.value)
        if owner is not None and not node.attr.startswith("__"):
            self.found.append(Use(owner, node.attr, node.lineno))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        texts = [word for word in words if isinstance(word, str)]
        if texts and texts[0].split(".")[0] == ROOT and _name_of(node.func) != "find_spec":
            self.found += [Use(texts[0], name, node.lineno) for name in texts[1:] or [""]]
        if _name_of(node.func) in {"hasattr", "getattr"} and texts and node.args:
            owner = self.owner_of(node.args[0])
            if owner is not None and not texts[0].startswith("__"):
                self.found.append(Use(owner, texts[0], node.lineno))
        called = self.owner_of(node.func)
        if called in facts()["classes"] and called is not None:
            known = parameters_of(called)
            self.found += [
                Use(called, f"{word.arg}=", node.lineno)
                for word in node.keywords
                if word.arg is not None and word.arg not in known
            ]
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        owner = self.owner_of(value)
        if owner is not None and isinstance(target, ast.Name):
            self._owners[target.id] = owner

    def _owner_of_call(self, node: ast.Call) -> str | None:
        texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        if _name_of(node.func) == "find_spec":
            return None
        if not texts or not isinstance(texts[0], str) or texts[0].split(".")[0] != ROOT:
            return None
        return _class_in(texts[0], str(texts[1])) if len(texts) > 1 else texts[0]


def uses_of(source: str) -> list[Use]:
    """Return what code takes from the package: imports, attributes, getattr names, call
    keywords.
    """
    visitor = _Uses()
    visitor.visit(ast.parse(source))
    return visitor.found


def keywords_by_callee(source: str) -> list[tuple[str, str, int]]:
    """Return (last name of the callee, keyword, line) of every call."""
    return [
        (_name_of(node.func), word.arg, node.lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        for word in node.keywords
        if word.arg is not None
    ]


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _class_in(owner: str, name: str) -> str | None:
    """Return the class or module that `name` of `owner` is; None for other names."""
    path = f"{owner}.{name}"
    if path in facts()["classes"] or path in facts()["modules"]:
        return path
    return class_path(name) if owner in facts()["modules"] else None
