"""docs/contract.md is generated from all of protos/, and is current."""

from __future__ import annotations

import pytest

from contract_page import PAGE, contract_page
from proto_image import find_buf, read_contract

BUF = find_buf()
needs_buf = pytest.mark.skipif(BUF is None, reason="needs buf: pip install buf-bin")


@needs_buf
def test_the_page_is_current() -> None:
    assert BUF is not None
    assert PAGE.read_text(encoding="utf-8") == contract_page(BUF), "run docs/tools/contract_page.py"


@needs_buf
def test_no_element_is_without_words() -> None:
    assert BUF is not None
    for file in read_contract(BUF):
        assert file.comment(12), file.name
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|") and "<a id=" in line]
    assert rows
    assert [row for row in rows if row.endswith("|  |")] == []
