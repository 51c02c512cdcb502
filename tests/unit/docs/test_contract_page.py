"""docs/contract.md is generated from all of protos/, and is up to date."""

from __future__ import annotations

import pytest

from contract_page import PAGE, contract_page
from proto_image import find_buf

BUF = find_buf()
needs_buf = pytest.mark.skipif(BUF is None, reason="needs buf: pip install buf-bin")


@needs_buf
def test_the_page_is_current() -> None:
    assert BUF is not None
    assert PAGE.read_text(encoding="utf-8") == contract_page(BUF), "run docs/tools/contract_page.py"
