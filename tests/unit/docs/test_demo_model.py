"""What pages say of the size of the demo model is what its file holds."""

from __future__ import annotations

import json
import math
import re
import struct

from support.pages import REPOSITORY, markdown_pages, page_id

WEIGHTS = (
    REPOSITORY / "executors" / "penstock" / "executor" / "models" / "demo" / "model.safetensors"
)
FIGURE = re.compile(r"([\d.]+)\s+million\s+parameters")


def num_parameters() -> int:
    """From the header of the file: its length in 8 bytes, then JSON with every tensor's shape."""
    with WEIGHTS.open("rb") as file:
        (num_bytes,) = struct.unpack("<Q", file.read(8))
        tensors = json.loads(file.read(num_bytes))
    return sum(math.prod(tensors[name]["shape"]) for name in tensors if name != "__metadata__")


def test_pages_tell_the_size_of_the_demo_model() -> None:
    told = {
        page_id(page): figures
        for page in markdown_pages()
        if (figures := FIGURE.findall(page.read_text(encoding="utf-8")))
    }

    assert "docs/quick-start.md" in told
    expected = f"{num_parameters() / 1e6:.1f}"
    assert {page: figures for page, figures in told.items() if set(figures) != {expected}} == {}
