"""The words check finds words to avoid in prose and in identifiers, and reports their lines."""

from pathlib import Path

import pytest

from words_check import markers, prose

SOURCE = '''"""Reports what was told."""

def test_a_call_is_told(heardLast: int, all_told: "Verdict") -> None:
    HTTPHouse = "a string that says"  # anew
'''


def test_identifiers_and_prose_are_checked() -> None:
    found = [(line, words) for line, words, _ in markers(prose(Path("server/a.py"), SOURCE))]
    assert found == [
        (1, "told"),
        *((3, word) for word in ("told", "heard", "told", "Verdict")),
        *((4, word) for word in ("House", "says", "anew")),
    ]


@pytest.mark.parametrize(
    "name", ["golden", "ConnectionRefusedError", "warehouse", "whole", "onward"]
)
def test_parts_of_words_are_no_markers(name: str) -> None:
    assert not list(markers(prose(Path("tests/a.py"), f"{name} = 1\n")))
