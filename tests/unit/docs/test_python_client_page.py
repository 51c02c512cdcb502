"""The API reference of the Python client lists every public name once."""

from __future__ import annotations

import re

import penstock.client
from support.pages import REPOSITORY

PAGE = REPOSITORY / "docs" / "python-client.md"


def test_every_public_name_is_listed_once() -> None:
    text = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^(?:::: penstock\.client\.|        - )([A-Z]\w+|retry\w+)$", text, re.M)

    assert sorted(listed) == sorted(penstock.client.__all__)
