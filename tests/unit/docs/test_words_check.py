"""The words check finds words to avoid in prose and in identifiers, and reports their lines."""

from pathlib import Path

import pytest

import words_check
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


def test_a_finding_is_printed_with_what_to_write_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("The client is `told`.\n\nIt hears of it.\n", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["words_check.py", str(page)])

    assert words_check.main() == 1
    assert capsys.readouterr().out == f"{page}:3: hears -> receive, detect\n"


def test_the_help_describes_how_to_mend_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["words_check.py", "--help"])

    with pytest.raises(SystemExit):
        words_check.main()

    assert "mend a finding" in capsys.readouterr().out
