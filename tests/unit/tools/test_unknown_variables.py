"""Commands warn of environment variables with misspelt names."""

from __future__ import annotations

import sys

import pytest

from penstock.server.cli.variables import misspelling_warnings
from penstock.server.config import SETTINGS
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


def test_commands_do_not_warn_of_settings_nor_of_other_programs() -> None:
    others = {"PENSTOCK_PICKER_SERVICE_HOST", "PENSTOCK_PICKER_PORT_9002_TCP", "PENSTOCK_IMAGE"}
    names = others | {item.variable for item in SETTINGS}

    assert misspelling_warnings(dict.fromkeys(names, "1")) == []


def test_commands_do_not_import_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.server.config", None)

    (warning,) = misspelling_warnings({"PENSTOCK_TOKENFILE": "a", "PENSTOCK_MODEL": "demo"})

    assert warning.startswith("PENSTOCK_TOKENFILE ")
    assert warning.endswith("did you mean PENSTOCK_TOKEN_FILE?")
