"""The errors of the command line if only the client package is installed."""

from __future__ import annotations

import importlib.util

import pytest

from penstock.tools.command_line import main


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (("serve",), "torch"),
        (("serve", "--executor", "trtllm"), "server"),
        (("simulate",), "tools"),
        (("verify",), "tools"),
        (("demo",), "torch"),
        (("demo", "--executor=simulated"), "tools"),
    ],
)
def test_a_command_of_the_server_names_the_one_extra_that_it_needs(
    command: tuple[str, ...],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvloop" else found(name)
    )

    assert main(command) == 2
    assert capsys.readouterr().err == (
        f'penstock {command[0]}: requires the extra "{extra}" of penstock'
        f" (uvloop is not installed): pip install '.[{extra}]' in a checkout,"
        f" or pip install 'WHEEL[{extra}]'\n"
    )


def test_a_command_with_its_own_extra_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "hdrh" else found(name)
    )

    assert main(("bench", "--help")) == 2
    assert capsys.readouterr().err == (
        'penstock bench: requires the extra "bench" of penstock (hdrh is not installed):'
        " pip install '.[bench]' in a checkout, or pip install 'WHEEL[bench]'\n"
    )


def test_a_command_of_the_client_needs_nothing_of_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    assert main(("version",)) == 0
    reported = capsys.readouterr().out
    assert reported.startswith("penstock ")
    assert "\ngrpcio " in reported
