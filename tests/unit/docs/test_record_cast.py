"""Recordings of a terminal: what is on its screen, what is cut, and pictures that fetch nothing."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from record_cast import Output, Screen, cast_text, frames, picture, read_cast, record
from support.pages import REPOSITORY

SIZE = {"columns": 20, "rows": 4}
PICTURES = REPOSITORY / "docs" / "pictures"


def test_lines_are_drawn_over_as_a_terminal_does() -> None:
    screen = Screen(**SIZE)
    screen.write("one\r\ntwo\r\n\x1b[2A\r\x1b[2Knew")
    assert screen.lines == ("new", "two", "")


def test_a_sequence_may_be_cut_by_the_end_of_a_piece() -> None:
    screen = Screen(**SIZE)
    for piece in ("a\x1b", "[1mb\x1b[", "0mc"):
        screen.write(piece)
    assert screen.lines == ("abc",)


def test_long_lines_are_wrapped_and_old_ones_leave_the_screen() -> None:
    screen = Screen(**SIZE)
    screen.write("x" * 25 + "".join(f"\r\n{number}" for number in range(3)))
    assert screen.lines == ("xxxxx", "0", "1", "2")


def test_waits_are_cut_and_no_frame_is_lost_at_the_end() -> None:
    shown = frames([Output(1.0, "a"), Output(60.0, "b"), Output(60.1, "c")], max_wait_s=3.0, **SIZE)
    assert [frame.at_s for frame in shown] == [0.0, 1.0, 4.0]
    assert shown[-1].lines == ("abc",)


def test_a_command_is_recorded_with_what_a_terminal_makes_of_it(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import sys; print(sys.stdout.isatty())")
    outputs = record(command, **SIZE)
    assert "".join(output.text for output in outputs) == "True\r\n"
    path = tmp_path / "a.cast"
    path.write_text(cast_text(outputs, "title", **SIZE), encoding="utf-8")
    title, again = read_cast(path)
    assert (title, [output.text for output in again]) == ("title", [one.text for one in outputs])


@pytest.mark.parametrize("scene", ["kill", "flood", "deadline"])
def test_the_scenes_are_drawn_without_scripts_and_fetch_nothing(scene: str) -> None:
    text = (PICTURES / f"demo-{scene}.svg").read_text(encoding="utf-8")
    assert (ET.fromstring(text)[0].text or "").startswith(f"penstock demo --{scene}")
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_picture_ends_with_the_last_frame_where_nothing_moves() -> None:
    shown = frames([Output(1.0, "<a>\r\n"), Output(2.0, "b")], max_wait_s=3.0, **SIZE)
    text = picture(shown, "t", "n", **SIZE)
    assert "&lt;a&gt;" in text
    assert text.index("#p{transform:translateY(-148px)") > 0
    ET.fromstring(text)
