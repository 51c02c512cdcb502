"""docs/contract.md is made of protos/, all of them, and is current."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock.v1 as pb
from comment_text import CommentWriter
from contract_page import PAGE, contract_page
from markdown_source import anchors
from proto_image import REPOSITORY, find_buf, read_contract

BUF = find_buf()
needs_buf = pytest.mark.skipif(BUF is None, reason="needs buf: pip install buf-bin")


@needs_buf
def test_the_page_is_current() -> None:
    assert BUF is not None
    assert PAGE.read_text(encoding="utf-8") == contract_page(BUF), "run docs/tools/contract_page.py"


def test_the_page_has_every_element() -> None:
    pool = pb.GenerateRequest.DESCRIPTOR.file.pool
    elements: set[str] = set()
    for path in (REPOSITORY / "protos/penstock/v1").glob("*.proto"):
        file = pool.FindFileByName(f"penstock/v1/{path.name}")
        for message in file.message_types_by_name.values():
            elements |= {message.name, *(f"{message.name}.{f.name}" for f in message.fields)}
        for enum in file.enum_types_by_name.values():
            elements |= {enum.name, *(value.name for value in enum.values)}
        for service in file.services_by_name.values():
            elements |= {service.name, *(f"{service.name}.{m.name}" for m in service.methods)}

    assert elements <= anchors(PAGE.read_text(encoding="utf-8"))


@needs_buf
def test_no_element_is_without_words() -> None:
    assert BUF is not None
    for file in read_contract(BUF):
        assert file.comment(12), file.name
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|") and "<a id=" in line]
    assert rows
    assert [row for row in rows if row.endswith("|  |")] == []


@needs_buf
def test_a_file_without_a_place_on_the_page_is_refused(tmp_path: Path) -> None:
    assert BUF is not None
    folder = tmp_path / "penstock" / "v1"
    folder.mkdir(parents=True)
    (folder / "new.proto").write_text('syntax = "proto3";\npackage penstock.v1;\n')

    with pytest.raises(ValueError, match=r"new\.proto"):
        contract_page(BUF, tmp_path)


def test_comments_link_what_they_name_and_keep_their_drawings() -> None:
    text = CommentWriter(anchors={"ModelLimits", "ModelLimits.max_num_outputs", "Prompt"})

    assert text.line("At most ModelLimits.max_num_outputs; Prompt is English.") == (
        "At most [ModelLimits.max_num_outputs](#ModelLimits.max_num_outputs); Prompt is English."
    )
    assert text.cell("Repeats {n} | `a|b`.\n\nAnd <more>.") == (
        "Repeats \\{n\\} \\| `a\\|b`.<br>And &lt;more&gt;."
    )
    assert text.blocks("So:\n\n  A -> B\n    ^") == "So:\n\n```text\nA -> B\n  ^\n```"
