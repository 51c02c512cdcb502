"""The flags of `penstock generate` and `penstock chat`, the commands that the banner of `penstock
serve` suggests, and how a command connects to a service and describes its errors.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.client import (
    DEFAULT_OPERATIONS_ADDRESS,
    Adapter,
    ChoiceConstraint,
    GrammarConstraint,
    JsonSchemaConstraint,
    RegexConstraint,
    TlsConfig,
)
from penstock.client.errors import Failure, error_of
from penstock.server.cli.connection import (
    UsageError,
    default_address,
    default_operations_address,
    describe_error,
    with_flags,
)
from penstock.server.cli.connection_options import (
    add_connection_options,
    client_options,
    report_retry,
)
from penstock.server.cli.generation_options import add_generation_options, options_of
from penstock.server.cli.serve import banner_lines
from penstock.server.processes.supervisor import ServiceReady


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
def test_a_constraint_is_set_by_one_flag(flags: tuple[str, ...], constraint: object) -> None:
    assert parse(*flags)["constraint"] == constraint


def test_two_constraints_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--regex", "a", "--choice", "a")
    assert "not allowed with argument" in capsys.readouterr().err


def test_an_adapter_is_selected_by_name() -> None:
    assert parse()["adapter"] is None
    assert parse("--adapter", "poet")["adapter"] == Adapter(name="poet")


READY = ServiceReady(
    address="127.0.0.1:50051",
    model="demo",
    executor="simulated",
    num_fronts=1,
    start_s=1.0,
    resources="",
    has_tls=False,
    operations_address="127.0.0.1:50052",
    metrics_url=None,
)


def test_penstock_top_is_suggested_only_where_rich_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rich", reason="needs the extra top")
    monkeypatch.setattr(sys, "argv", ["penstock", "serve"])
    assert "penstock top" in "\n".join(banner_lines(READY))
    monkeypatch.setitem(sys.modules, "rich", None)
    assert "penstock top" not in "\n".join(banner_lines(READY))


@pytest.mark.parametrize(
    ("called", "shown"),
    [
        (".venv/bin/penstock", ".venv/bin/penstock"),
        ("/my env/bin/penstock", "'/my env/bin/penstock'"),
        ("/env/penstock/tools/__main__.py", f"{shlex.quote(sys.executable)} -m penstock.tools"),
    ],
)
def test_the_banner_calls_penstock_by_name_only_where_a_shell_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, called: str, shown: str
) -> None:
    monkeypatch.setattr(sys, "argv", [called, "serve"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"  {shown} generate " in "\n".join(banner_lines(READY))
    (tmp_path / "penstock").touch(mode=0o755)
    assert "  penstock generate " in "\n".join(banner_lines(READY))


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, "127.0.0.1:50051"),
        ({"PENSTOCK_PORT": "7000"}, "127.0.0.1:7000"),
        ({"PENSTOCK_PORT": "tcp://10.0.0.1:50051"}, "127.0.0.1:50051"),
        # No port: the command reports that.
        ({"PENSTOCK_PORT": "many"}, "127.0.0.1:many"),
        ({"PENSTOCK_PORT": "7000", "PENSTOCK_ADDRESS": "there:1"}, "there:1"),
    ],
)
def test_the_default_address_is_where_serve_would_listen(
    environment: dict[str, str], address: str
) -> None:
    assert default_address(environment) == address


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, DEFAULT_OPERATIONS_ADDRESS),
        ({"PENSTOCK_PORT": "7000"}, "127.0.0.1:7001"),
        ({"PENSTOCK_PORT": "tcp://10.0.0.1:50051"}, "127.0.0.1:50052"),
        ({"PENSTOCK_PORT": "7000", "PENSTOCK_OPERATIONS_PORT": "9000"}, "127.0.0.1:9000"),
        ({"PENSTOCK_OPERATIONS_PORT": "off"}, "127.0.0.1:50052"),
        ({"PENSTOCK_PORT": "7000", "PENSTOCK_OPERATIONS": "there:1"}, "there:1"),
    ],
)
def test_operations_are_one_port_above(environment: dict[str, str], address: str) -> None:
    assert default_operations_address(environment) == address


def tls_of(*flags: str) -> object:
    parser = argparse.ArgumentParser()
    add_connection_options(parser)
    return client_options(parser.parse_args(flags))["tls"]


@pytest.mark.parametrize(
    ("text", "flags", "tls"),
    [
        (None, (), False),
        ("on", (), TlsConfig()),
        ("off", (), False),
        ("off", ("--tls",), TlsConfig()),
        # As in the settings, a flag overrides its variable, which is not read then.
        ("yes", ("--tls",), TlsConfig()),
    ],
)
def test_tls_is_a_flag_or_a_variable(
    monkeypatch: pytest.MonkeyPatch, text: str | None, flags: tuple[str, ...], tls: object
) -> None:
    monkeypatch.delenv("PENSTOCK_TLS", raising=False)
    if text is not None:
        monkeypatch.setenv("PENSTOCK_TLS", text)
    assert tls_of(*flags) == tls


@pytest.mark.parametrize("text", ["yes", "1", "true", "ON", " on", ""])
def test_an_invalid_value_of_the_tls_variable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("PENSTOCK_TLS", text)
    with pytest.raises(UsageError) as raised:
        tls_of()
    assert str(raised.value) == f"PENSTOCK_TLS must be one of on, off, not {text!r}"


def test_a_rejected_deadline_has_an_estimate_and_a_retry_time() -> None:
    error = error_of(
        Failure(
            code=grpc.StatusCode.DEADLINE_EXCEEDED,
            reason="DEADLINE_UNREACHABLE",
            message="the deadline cannot be met",
            retry_after_s=2.5,
            metadata={"estimate_ms": "1750"},
            request_id="r",
        )
    )
    assert describe_error(error) == (
        "DEADLINE_EXCEEDED (DEADLINE_UNREACHABLE): the deadline cannot be met;"
        " estimated time 1.75 s; retry in 2.5 s [request r]"
    )


def test_an_unsupported_option_is_named_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["penstock", "generate", "--adapter", "poet", "hi"])
    message = "adapter: is not supported by the simulated executor"
    assert with_flags(message) == "--adapter is not supported by the simulated executor"


def test_a_prompt_that_is_too_long_is_named_as_the_argument() -> None:
    message = "the request exceeds the model's context: text_prompt.text: has at least 9 tokens"
    failure = Failure(
        code=grpc.StatusCode.INVALID_ARGUMENT, reason="PROMPT_TOO_LONG", message=message
    )
    assert describe_error(error_of(failure)).endswith(" context: prompt: has at least 9 tokens")


def test_missing_details_of_an_error_are_not_printed() -> None:
    error = error_of(Failure(code=grpc.StatusCode.UNAVAILABLE, message="gone"))
    assert describe_error(error) == "UNAVAILABLE: gone"


@pytest.mark.parametrize(
    ("grpc_message", "hint"),
    [
        (
            "ipv4:127.0.0.1:9: Failed to connect to remote host: Connection refused",
            "no service at 127.0.0.1:9: is `penstock serve` running? (UNAVAILABLE: ",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to"
            " connect to remote host: Connection refused",
            "no service at 127.0.0.1:9: is `penstock serve` running?"
            " (UNAVAILABLE: Connection refused)",
        ),
        (
            "ipv6:%5B::1%5D:9: Failed to connect to remote host: Connection refused",
            "no service at [::1]:9: is ",
        ),
        (
            "unix:/run/p.sock: Failed to connect to remote host: No such file or directory",
            "no service at /run/p.sock: is ",
        ),
        (
            "ipv4:127.0.0.1:9: Failed parsing HTTP/2 (Expected SETTINGS frame)",
            "127.0.0.1:9 is not a gRPC port: ",
        ),
        ("Tls handshake failed (TSI_PROTOCOL_FAILURE)", "only one side uses TLS"),
        (
            "errors resolving nowhere:1: [C-ares: Domain name not found]",
            "no such host: 127.0.0.1:7",
        ),
    ],
)
def test_where_no_service_answers_the_line_states_what_to_look_for(
    grpc_message: str, hint: str
) -> None:
    failure = Failure(code=grpc.StatusCode.UNAVAILABLE, message=grpc_message, address="127.0.0.1:7")
    assert describe_error(error_of(failure)).startswith(hint)

    of_service = Failure(
        code=grpc.StatusCode.UNAVAILABLE, reason="ENGINE_DOWN", message=grpc_message
    )
    assert hint not in describe_error(error_of(of_service)).replace(grpc_message, "")


@pytest.mark.parametrize(
    "answer", ["Method not found!", "unknown service penstock.v1.ModelService"]
)
def test_a_port_without_the_called_service_is_reported_as_the_wrong_port(answer: str) -> None:
    failure = Failure(code=grpc.StatusCode.UNIMPLEMENTED, message=answer, address="127.0.0.1:7")
    assert describe_error(error_of(failure)) == (
        "wrong port, or an older service, at 127.0.0.1:7: operations calls (`penstock top`) need"
        " the operations port, all others the main port; `penstock serve` prints both"
        f" (UNIMPLEMENTED: {answer})"
    )
    # An error of the client itself has no address.
    failure = Failure(code=grpc.StatusCode.UNIMPLEMENTED, message="the server lacks Multiplex")
    assert describe_error(error_of(failure)) == "UNIMPLEMENTED: the server lacks Multiplex"


@pytest.mark.parametrize("wait_s", [0.4, 60.2])
def test_a_long_wait_before_a_retry_is_reported_with_its_cause(
    wait_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    failure = Failure(
        code=exhausted,
        reason="QUOTA_EXCEEDED",
        message='tenant "acme": at most 2',
        retry_after_s=59.1,
    )

    report_retry(error_of(failure), wait_s)

    line = capsys.readouterr().err
    cause = 'RESOURCE_EXHAUSTED (QUOTA_EXCEEDED): tenant "acme": at most 2'
    expected = f"penstock: {cause}: trying again in 60 s; Ctrl-C to stop\n"
    assert line == (expected if wait_s > 1 else "")
