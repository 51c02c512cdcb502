"""Wrong usage of a command prints one line with the error and a suggestion; the exit code is 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.tools import output_paths
from penstock.tools.command_line import main


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("grow", "penstock: unknown command 'grow'; known are serve, build, generate,"),
        ("generat", "penstock: unknown command 'generat'; did you mean generate? (see"),
        ("--verson", "penstock: unrecognized arguments: --verson; did you mean --version?"),
        ("--", "penstock: "),
        ("generate", "penstock generate: the following arguments are required: prompt"),
        (
            "generate Hi --max-tokens many",
            "penstock generate: --max-tokens must be an integer, not 'many' (see penstock",
        ),
        ("generate Hi --top-p x", "penstock generate: --top-p must be a number, not 'x' (see"),
        ("top --sort x", "penstock top: --sort must be one of age, "),
        ("generate Hi --temprature=4", "--temprature=4; did you mean --temperature? (see penstock"),
        ("generate Hi --temprature hi", "arguments: --temprature; did you mean --temperature?"),
        ("generate Hi -t -1", "unrecognized arguments: -t (see penstock generate --help)"),
        ("generate Hi there", "unrecognized arguments: there (see penstock generate --help)"),
        ("generate Hi --top-k -1", "top_k: must be at least 1, not -1"),
        (
            "generate Hi --deadline nan",
            "generate: --deadline must be a positive number of seconds, not 'nan'",
        ),
        *(
            (
                f"{command} --address 127.0.0.1:",
                f"{command.split()[0]}: --address: there is no port after the colon of '127",
            )
            for command in ("generate Hi", "models", "health", "chat")
        ),
        (
            "bench --address x --rate 3",
            "arguments: --address --rate; did you mean --rates? (see penstock",
        ),
        ("bench 127.0.0.1:1", "penstock bench: --rates, --concurrency or --trace must be given"),
        ("bench 192.0.2.1:1 --rates 1", "192.0.2.1:1 is not this machine; add --allow-remote"),
        ("bench 127.0.0.1:1 --rates 1 --channels 0", "--channels must be in 1.."),
        ("bench --own-service --rates 0", "--rates must be above 0"),
        ("bench 127.0.0.1:1 --rates 1 --processes 0", "--processes must be in 1..256"),
        *(
            # Before anything is started or reached: either would end with code 3.
            (f"bench {where} --rates 1 {option}", f"bench: {line}")
            for where in ("127.0.0.1:1", "--own-service")
            for option, line in (
                ("--channels 0", "--channels must be in 1..1024, not 0"),
                ("--prompt-tokens foo", "--prompt-tokens: must be N, uniform:MIN:MAX or"),
                ("--duration-s x", "--duration-s must be a number, not 'x'"),
                ("--duration-s nan", "--duration-s must be finite and above 0, not nan"),
                ("--target-ttft-s -1", "--target-ttft-s must be above 0, not -1.0"),
                ("--deadline-s 1e300", "--deadline-s must be above 0 and at most 86400"),
            )
        ),
        *(
            (f"bench --own-service --trace /dev/null {option}", f"bench: {line}")
            for option, line in (
                ("--load x", "--load must be a number, not 'x'"),
                ("--start-s nan", "--start-s must be finite and at least 0, not nan"),
                ("--max-prompt-tokens 0", "--max-prompt-tokens must be at least 1, not 0"),
                ("--max-output-tokens 0", "--max-output-tokens must be at least 1, not 0"),
                ("--warm-up-s 0", "/dev/null: contains no requests"),
            )
        ),
        ("verify --skip magic", "--skip: unknown check magic"),
        ("verify --json /nowhere/report.json", "--json: folder /nowhere does not exist"),
        *(
            # Before a trace is read: its file does not exist.
            (f"{command} --trace /nowhere --report /dev/null/x", "--report: /dev/null is not a")
            for command in ("simulate", "plan --target-ttft-p99-s 1 --target-itl-p99-ms 50")
        ),
        ("verify -- --model demo", "options of serve require --serve"),
        ("verify localhost:50051", "an address: --address localhost:50051"),
        ("verify --concurrency 0", "--concurrency must be at least 1"),
        ("top --json", "--json requires --once"),
        ("top --once --address http://here", "penstock top: --address: must be"),
        ("top --once --service http://here", "penstock top: --service: must be"),
        ("top --once --interval 0", "must be a positive number of seconds"),
        ("serve --executor simulated --record-max-mib 0", "record-max-mib must be at least 1"),
        *(
            (f"serve --executor simulated {option}", line)
            for option, line in (
                ("--block-size 0", "block-size"),
                ("--drain-timeout-s nan", "drain-timeout-s"),
                ("--fronts 0", "fronts"),
                (
                    '--simulated-config {"zzz":3}',
                    "--simulated-config.zzz is unknown; known are cost, faults, is_readable,"
                    " is_real_time, is_strict, kv_bytes_per_token, max_output_tokens,"
                    " min_output_tokens, vocab_size\n",
                ),
                ("--simulated-config {", "simulated-config"),
            )
        ),
        ("serve --bogus", "penstock serve: unrecognized arguments: --bogus (see penstock"),
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


@pytest.mark.parametrize(
    ("words", "variable", "value", "line"),
    [
        ("generate Hi", "PENSTOCK_ADDRESS", "a b", "PENSTOCK_ADDRESS: must be HOST, HOST:PORT,"),
        ("models", "PENSTOCK_PORT", "many", "PENSTOCK_PORT: the port must be from 1 to 65535, not"),
        ("models --address :1", "PENSTOCK_ADDRESS", ":1", "--address: must be HOST, HOST:PORT,"),
        ("top --once", "PENSTOCK_OPERATIONS", "a b", "PENSTOCK_OPERATIONS: must be HOST,"),
        ("top --once", "PENSTOCK_OPERATIONS_PORT", "0", "PENSTOCK_OPERATIONS_PORT: the port must"),
        ("top --once", "PENSTOCK_PORT", "65535", "PENSTOCK_PORT is 65535, and there is no next"),
        ("top --once", "PENSTOCK_PORT", "65536", "PENSTOCK_PORT: the port must be from 1 to 65535"),
        ("bench --rates 1", "PENSTOCK_PORT", "many", "PENSTOCK_PORT: the port must be from 1 to"),
        ("bench --rates 1", "PENSTOCK_ADDRESS", "a b", "PENSTOCK_ADDRESS: must be HOST, HOST:"),
        ("bench localhost,localhost --rates 1", "PENSTOCK_PORT", "1", "ADDRESS: localhost:50051"),
        ("bench [1]:1 --rates 1", "PENSTOCK_PORT", "1", "ADDRESS: not an IPv6 address: "),
    ],
)
def test_an_invalid_address_is_reported_with_the_flag_or_the_variable_that_set_it(
    words: str,
    variable: str,
    value: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)

    assert main(words.split()) == 2
    assert f"penstock {words.split()[0]}: {line}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "variables", "line"),
    [
        ("health --ca /none", {}, "--ca: /none cannot be read"),
        ("health", {"CA": "/none"}, "PENSTOCK_CA: /none cannot be read"),
        ("health", {"CA": "/dev/null"}, "PENSTOCK_CA: /dev/null contains no certificate in PEM"),
        ("health --cert x", {}, "--cert requires --key"),
        ("health", {"CERT": "x"}, "PENSTOCK_CERT requires --key"),
        ("health", {"KEY": "x"}, "PENSTOCK_KEY requires --cert"),
        ("models --server-name x", {}, "--server-name requires --tls or --ca"),
        ("models", {"SERVER_NAME": "x"}, "PENSTOCK_SERVER_NAME requires --tls or --ca"),
        ("models --token-file /none", {}, "--token-file: /none cannot be read"),
        ("models", {"TOKEN_FILE": "/none"}, "PENSTOCK_TOKEN_FILE: /none cannot be read"),
        ("models", {"TOKEN_FILE": "/dev/null"}, "PENSTOCK_TOKEN_FILE /dev/null: "),
    ],
)
def test_an_invalid_connection_option_is_reported_with_the_flag_or_the_variable_that_set_it(
    words: str,
    variables: dict[str, str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)

    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"penstock {words.split()[0]}: {line}")


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ("", "prompt"),
        ("secret\udcff", "generate: prompt: the prompt is not valid UTF-8\n"),
    ],
)
def test_an_invalid_prompt_is_not_repeated_in_the_error(
    prompt: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", prompt]) == 2

    reported = capsys.readouterr().err
    assert reported.startswith("penstock generate: ")
    assert line in reported
    assert reported.count("\n") == 1
    assert "secret" not in reported


@pytest.mark.parametrize(
    "command", ["", "serve", "generate", "chat", "models", "health", "version", "demo"]
)
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "exit codes:" in shown
    # `demo` calls only the service that it starts; `version` calls none.
    assert ("no service at the address" in shown) is (command not in ("serve", "version", "demo"))


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: penstock")


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("penstock ")


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("simulate --trace /nowhere", "tools"),
        ("plan --trace /nowhere --target-ttft-p99-s 1 --target-itl-p99-ms 9", "tools"),
        ("bench 127.0.0.1:1 --rates 1", "bench"),
    ],
)
def test_a_report_without_matplotlib_names_the_extra_of_the_command(
    command: str,
    extra: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_paths, "find_spec", lambda name: None)

    assert main([*command.split(), "--report", str(tmp_path)]) == 2

    expected = f'--report requires the extra "{extra}" of penstock (matplotlib is not installed): '
    assert expected in capsys.readouterr().err
