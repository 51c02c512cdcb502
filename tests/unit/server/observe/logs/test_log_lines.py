"""One event is one line, as text or JSON, with the ids of its request and without the request's
content.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from typing import Any

import pytest

from penstock.server.observe.logs.lines import JsonFormatter, ShortFormatter, TextFormatter

CANARY = "canary of a prompt"


def record(message: str = "it %s", *args: object, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord(
        more.pop("name", "a.b"),
        more.pop("level", logging.ERROR),
        "f.py",
        1,
        message,
        args,
        more.pop("exc_info", None),
    )
    made.created, made.msecs = 0.0, 7.0
    for key, fact in more.items():
        setattr(made, key, fact)
    return made


def failure() -> Any:
    try:
        int(CANARY)  # its words quote it
    except ValueError:
        return sys.exc_info()


def test_a_text_line_has_time_process_and_message() -> None:
    line = TextFormatter("engine").format(record("it %s", "broke"))
    assert line == f"1970-01-01T00:00:00.007Z ERROR engine[{os.getpid()}] a.b: it broke"


def test_a_short_line_has_time_process_and_message() -> None:
    formatter = ShortFormatter("engine")
    warning = record("it %s", "broke", level=logging.WARNING, request_id="r")
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d WARNING engine: it broke request=r", formatter.format(warning)
    )
    assert formatter.format(record("up", level=logging.INFO))[8:] == " engine: up"


def test_a_json_line_has_the_same_content() -> None:
    line = JsonFormatter("front").format(record("it %s", "broke", level=logging.WARNING))
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.007Z",
        "level": "warning",
        "process": "front",
        "pid": os.getpid(),
        "logger": "a.b",
        "message": "it broke",
    }


def test_a_line_has_the_ids_of_its_request_and_no_other_extra() -> None:
    reported = record(
        "cut", request_id="r-1", trace_id="ab" * 16, step=0, front_id=None, prompt=CANARY
    )
    line = TextFormatter("front").format(reported)
    assert line.endswith(f" a.b: cut request=r-1 trace={'ab' * 16} step=0")
    fields = json.loads(JsonFormatter("front").format(reported))
    assert (fields["request_id"], fields["trace_id"], fields["step"]) == ("r-1", "ab" * 16, 0)
    assert set(fields) == {
        *("time", "level", "process", "pid", "logger", "message"),
        *("request_id", "trace_id", "step"),
    }


def test_the_number_of_omitted_lines_is_reported() -> None:
    reported = record("cut", num_left_out=7)
    assert TextFormatter("front").format(reported).endswith("cut (7 more like it left out)")
    assert json.loads(JsonFormatter("front").format(reported))["num_left_out"] == 7


@pytest.mark.parametrize(
    "name", ["a\nb", "a b=c", 'a"b', "\x1b[31mred", "a\u2028b", "a\x85b", "a\ud800b"]
)
def test_no_name_breaks_out_of_its_line(name: str) -> None:
    reported = record("%s", name, request_id=name)
    text = TextFormatter("front").format(reported)
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text
    assert " request=a b=c" not in text
    line = JsonFormatter("front").format(reported)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["request_id"] == name


@pytest.mark.parametrize("formatter", [TextFormatter, JsonFormatter])
def test_an_exception_is_logged_as_type_and_frames_without_its_message(formatter: Any) -> None:
    line = formatter("engine").format(record("failed", exc_info=failure()))
    assert "ValueError" in line
    assert CANARY not in line
    assert "failure" in line, "the function it rose in"
    assert len(line.splitlines()) == 1
    line = formatter("engine", has_exception_messages=True).format(
        record("failed", exc_info=failure())
    )
    assert CANARY in line


def test_frames_are_listed_innermost_first_in_text_and_last_in_json() -> None:
    def outer() -> None:
        inner()

    def inner() -> None:
        raise KeyError(CANARY)

    with pytest.raises(KeyError) as caught:
        outer()
    reported = record("failed", exc_info=(caught.type, caught.value, caught.tb))
    text = TextFormatter("engine").format(reported)
    assert text.index("inner") < text.index("outer")
    (exception,) = json.loads(JsonFormatter("engine").format(reported))["exception"]
    assert exception["type"] == "KeyError"
    assert [frame["function"].rpartition(".")[2] for frame in exception["frames"]][-2:] == [
        "outer",
        "inner",
    ]
    assert exception["frames"][-1]["module"] == __name__


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        (
            f"Task exception was never retrieved\nfuture: <Task exception=ValueError('{CANARY}')>",
            "Task exception was never retrieved",
        ),
        (f"Exception in callback take('{CANARY}')", "Exception in callback take"),
    ],
)
def test_representations_of_asyncio_objects_are_omitted(message: str, reported: str) -> None:
    line = TextFormatter("front").format(record(message, name="asyncio"))
    assert line.endswith(f"asyncio: {reported}")


def test_messages_of_other_packages_are_logged_only_if_permitted() -> None:
    reported = record("the engine's words", exception_message=CANARY)
    assert CANARY not in TextFormatter("engine").format(reported)
    assert CANARY not in JsonFormatter("engine").format(reported)
    line = TextFormatter("engine", has_exception_messages=True).format(reported)
    assert line.endswith(f'exception_message="{CANARY}"')
