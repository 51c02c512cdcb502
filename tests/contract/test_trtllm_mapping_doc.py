"""The tables of docs/tensorrt-llm-mapping.md have every field of the contract and every feature."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from google.protobuf.descriptor import Descriptor

from penstock.scheduler.executor import Feature
from penstock.server.rpc.mapping_in.generation import MAPPED_FIELDS
from penstock.server.rpc.mapping_in.prompt import UNSUPPORTED_FIELDS
from penstock.v1.generation_service_pb2 import GenerateRequest
from penstock.v1.model_pb2 import ModelFeatures

DOC = Path(__file__).parents[2] / "docs" / "tensorrt-llm-mapping.md"
CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Row:
    """A table row: the names in backticks in its first cell, and its other cells."""

    names: tuple[str, ...]
    cells: tuple[str, ...]


@cache
def tables() -> dict[str, list[Row]]:
    """Return the rows of each table. The key of a table is the headings of its first two columns,
    joined by "|".
    """
    found: dict[str, list[Row]] = {}
    head = ""
    for line in DOC.read_text().splitlines():
        if not line.startswith("|"):
            head = ""
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not head:
            head = "|".join(cells[:2])
            assert head not in found
            found[head] = []
        elif set(line) - set("|- "):
            found[head].append(Row(tuple(CODE.findall(cells[0])), tuple(cells[1:])))
    return found


FIELDS = tables()["field|where it goes"]


def leaves(message: Descriptor, prefix: str = "") -> Iterator[str]:
    """Yield the paths of the message's fields, without the subfields of a field that is rejected as
    a whole.
    """
    for field in message.fields:
        path, inner = prefix + field.name, field.message_type
        is_ours = inner is not None and inner.file.package == message.file.package
        if inner is not None and is_ours and path not in UNSUPPORTED_FIELDS:
            yield from leaves(inner, f"{path}.")
        else:
            yield path


def test_every_field_of_the_contract_is_in_one_row() -> None:
    assert all(row.names for row in FIELDS)
    named = [name for row in FIELDS for name in row.names]
    assert len(set(named)) == len(named)
    assert set(named) == MAPPED_FIELDS | UNSUPPORTED_FIELDS.keys()
    assert set(named) == set(leaves(GenerateRequest.DESCRIPTOR))


def test_every_listed_feature_exists_and_every_executor_feature_has_a_row() -> None:
    published = set(ModelFeatures.DESCRIPTOR.fields_by_name)
    needed = {name for row in FIELDS for name in CODE.findall(row.cells[1])}
    assert needed <= published
    features = {name for row in tables()["feature|offered"] for name in row.names}
    assert features == {feature.value for feature in Feature}
    assert features <= needed
