"""The check of words finds markers in prose only."""

from pathlib import Path

import pytest

from words_check import markers, prose


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.md", "One.\nThe log tells it.", [(2, "tells")]),
        ("a.md", "The stream goes\n  on.", [(1, "goes on")]),
        ("a.md", "Callers wait. Who waits is\nserved. Who waits?", [(1, "Who")]),
        ("a.md", "It prints `tells` and [says](says.md).\n\n```sh\ntell\n```\n", [(1, "says")]),
        ("a.proto", "string told = 1;\n// The first one goes\n// on.\n", [(2, "goes on")]),
        ("a.py", 'told = 1\n\ndef f() -> None:\n    """Nobody.\n\n    Anew."""  # says\n',
         [(4, "Nobody"), (6, "Anew"), (6, "says")]),
    ],
)  # fmt: skip
def test_markers_are_found_where_people_read(
    name: str, text: str, found: list[tuple[int, str]]
) -> None:
    assert [(line, words) for line, words, _ in markers(prose(Path(name), text))] == found
