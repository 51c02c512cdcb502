"""The migration notes name fields that exist, here and there, and leave none of theirs out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from google.protobuf.descriptor import Descriptor

import penstock.v1 as pb
from penstock.executor.trtllm.config import TrtllmConfig
from penstock.server.rpc.mapping_in.generation import MAPPED_FIELDS
from penstock.tools.command_line import build_parser
from support.page_commands import spans
from support.pages import REPOSITORY

FOLDER = REPOSITORY / "docs" / "migration"
PAGES = sorted(FOLDER.glob("*.md"))
CODE = re.compile(r"`([^`]+)`")
# Names of gRPC that are no part of any contract.
STANDARD = {"grpc.health.v1", "google.rpc", "google.rpc.RetryInfo", "penstock.v1"}
POOL = pb.GenerateRequest.DESCRIPTOR.file.pool
FILES = [
    POOL.FindFileByName(f"penstock/v1/{path.name}")
    for path in sorted((REPOSITORY / "protos/penstock/v1").glob("*.proto"))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table: names there, names here; `is_without`: a dash says that there are none."""

    there: tuple[str, ...]
    here: tuple[str, ...]
    is_without: bool


def rows(page: Path) -> Iterator[Row]:
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and CODE.search(cells[0]):
            yield Row(
                there=tuple(CODE.findall(cells[0])),
                here=tuple(CODE.findall(cells[1])),
                is_without=cells[1] == "-",
            )


# --- ours


def is_path(name: str, message: Descriptor = pb.GenerateRequest.DESCRIPTOR) -> bool:
    """Whether `name` is a field of GenerateRequest, by its path."""
    head, _, rest = name.partition(".")
    field = message.fields_by_name.get(head)
    if field is None:
        return False
    if not rest:
        return True
    return field.message_type is not None and is_path(rest, field.message_type)


def is_element(name: str) -> bool:
    """Whether `name` is a message, service or enum value of ours, or a part of one of them."""
    head, _, rest = name.partition(".")
    for file in FILES:
        if head in file.message_types_by_name:
            return not rest or is_path(rest, file.message_types_by_name[head])
        if head in file.services_by_name:
            methods = {method.name for method in file.services_by_name[head].methods}
            return not rest or rest in methods
        if any(name in enum.values_by_name for enum in file.enum_types_by_name.values()):
            return True
    return False


def is_setting(name: str, settings: Any = TrtllmConfig) -> bool:
    """Whether `name` is a setting of the TensorRT-LLM executor, by its path."""
    head, _, rest = name.partition(".")
    hints = get_type_hints(settings)
    if head not in {field.name for field in fields(settings)}:
        return False
    kinds = [kind for kind in (hints[head], *get_args(hints[head])) if is_dataclass(kind)]
    return not rest or (len(kinds) == 1 and is_setting(rest, kinds[0]))


def is_option(name: str) -> bool:
    choices = next(a.choices for a in build_parser()._actions if isinstance(a.choices, dict))
    return name in choices["serve"].filled()._option_string_actions


def is_ours(name: str) -> bool:
    known = (is_path, is_element, is_setting, is_option)
    return name in STANDARD or any(test(name) for test in known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_stands_here_exists(page: Path) -> None:
    here = {name for row in rows(page) for name in row.here}
    if page.name == "index.md":
        # Its tables have what is here in the first column.
        here = {
            name
            for line in page.read_text(encoding="utf-8").splitlines()
            if line.startswith("| `")
            for name in CODE.findall(line.split("|")[1])
        }

    assert here
    assert {name for name in here if not is_ours(name)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_text_says_of_ours_exists(page: Path) -> None:
    groups = {name.partition(".")[0] for name in MAPPED_FIELDS}
    heads = groups | {
        name for file in FILES for name in (*file.message_types_by_name, *file.services_by_name)
    }
    foreign = {name for row in rows(page) for name in row.there}
    named = {
        span
        for span in spans(page.read_text(encoding="utf-8"))
        if span.partition(".")[0] in heads and span not in foreign
    }

    assert {name for name in named if not is_ours(name)} == set()


# --- theirs
