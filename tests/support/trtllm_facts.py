"""Lookups in the recorded table of TensorRT-LLM's API. Imports neither the package nor its
stand-in.
"""

from functools import cache
from typing import Any

from penstock.executor.trtllm.source_check import load_facts


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


def of_release_1_2(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if entry.get("since") in (None, "1.2")}


def class_paths(name: str) -> list[str]:
    """Return the table's paths of a class by its bare name, the shortest first."""
    paths = [path for path in facts()["classes"] if path.rpartition(".")[2] == name]
    return sorted(paths, key=len)


def members_of(path: str) -> set[str]:
    found = facts()["classes"][path]
    groups = ("fields", "attributes", "methods")
    return {name for group in groups for name in found.get(group, {})}


def all_names() -> set[str]:
    """Return every name in the table: the names that modules contain, classes, their members,
    parameters of methods, and the keys of statistics.
    """
    table = facts()
    names = {name for module in table["modules"].values() for name in module["names"]}
    for path, found in table["classes"].items():
        names |= members_of(path) | {path.rpartition(".")[2]}
        for method in found.get("methods", {}).values():
            names |= set(method["parameters"])
    return names | {key for part in table["statistics"].values() for key in part["keys"]}
