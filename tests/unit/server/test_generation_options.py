"""The requests that the flags of `generate` and `chat` build."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from penstock.client import (
    Adapter,
    ChoiceConstraint,
    GrammarConstraint,
    JsonSchemaConstraint,
    RegexConstraint,
)
from penstock.server.cli.generation_options import add_generation_options, options_of


def parse(*flags: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_generation_options(parser)
    return dict(options_of(parser.parse_args(flags)))


@pytest.mark.parametrize(
    ("flags", "constraint"),
    [
        ((), None),
        (("--json-schema", "{}"), JsonSchemaConstraint(schema="{}")),
        (("--regex", ""), RegexConstraint(pattern="")),
        (("--grammar", "root ::= 'a'"), GrammarConstraint(ebnf="root ::= 'a'")),
        (("--choice", "b", "--choice", "a"), ChoiceConstraint(choices=("b", "a"))),
    ],
)
def test_a_form_is_asked_for_by_one_flag(flags: tuple[str, ...], constraint: object) -> None:
    assert parse(*flags)["constraint"] == constraint


def test_two_forms_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--regex", "a", "--choice", "a")
    assert "not allowed with argument" in capsys.readouterr().err


def test_an_adapter_is_asked_for_by_name() -> None:
    assert parse()["adapter"] is None
    assert parse("--adapter", "poet")["adapter"] == Adapter(name="poet")
