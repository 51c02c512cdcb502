"""Commands warn of environment variables with misspelt names."""

from __future__ import annotations

import sys

import pytest

from penstock.server.cli.variables import unknown_variables
from penstock.tools.command_line import main


@pytest.mark.parametrize("command", ["version", "models --address :"])
def test_a_command_names_the_variable_that_was_meant(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_ADRESS", "127.0.0.1:1")

    main(command.split())

    assert capsys.readouterr().err.startswith(
        f"penstock {command.split()[0]}: PENSTOCK_ADRESS is set but is not a known setting;"
        " did you mean PENSTOCK_ADDRESS?\n"
    )


def test_without_the_settings_no_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.server.config", None)

    assert unknown_variables({"PENSTOCK_ADRESS": "127.0.0.1:1"}) == []
