"""Wrong usage gives one line with the error and a suggestion, and exit code 2."""

from __future__ import annotations

import pytest

from penstock.tools.command_line import main


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("grow", "penstock: error: unknown command 'grow'; known are serve, build, generate,"),
        ("generat", "penstock: error: unknown command 'generat'; did you mean generate? (see"),
        ("--verson", "penstock: error: unrecognized arguments: --verson; did you mean --version?"),
        ("--", "penstock: error: "),
        ("generate", "penstock generate: error: the following arguments are required: prompt"),
        ("generate Hi --max-tokens many", "penstock generate: error: argument --max-tokens: "),
        ("generate Hi --temprature=4", "--temprature=4; did you mean --temperature? (see penstock"),
        ("bench --address x --rate 3", "--address --rate 3; did you mean --rates? (see penstock"),
        ("bench 127.0.0.1:1", "penstock bench: --rates, --concurrency or --trace must be given"),
        ("bench 192.0.2.1:1 --rates 1", "192.0.2.1:1 is not this machine; add --allow-remote"),
        ("bench 127.0.0.1:1 --rates 1 --channels 0", "--channels must be in 1.."),
        ("bench --own-service --rates 0", "--rates must be above 0"),
        ("serve --bogus", "penstock serve: error: unrecognized arguments: --bogus (see penstock"),
        ("serve --max-num-seq=4", "--max-num-seq=4; did you mean --max-num-seqs? (see penstock"),
        ("serve --order lifo", "penstock serve: --order must be one of fair, fcfs, not 'lifo'"),
    ],
)
def test_bad_usage_is_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert line.lower() in printed.err.lower()
    assert printed.err.count("\n") == 1


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: penstock")


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("penstock ")
