"""Each command of docs/stock-tools.md has the documented result with a live server."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from support.authority import Authority
from support.service import simulated, started
from support.timeout import TEST_TIMEOUT_S

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "stock-tools.md").read_text(encoding="utf-8")
PAIRS = re.findall(r"^```sh test\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", TEXT, re.M | re.S)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without `PENSTOCK_*` variables, with the folder of this
    Python's programs first on PATH.
    """
    inherited = {key: value for key, value in os.environ.items() if key[:9] != "PENSTOCK_"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
    return {**inherited, "PATH": path}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def environment() -> AsyncIterator[dict[str, str]]:
    """Provide the environment of the page's commands: the variables of its first block, set for a
    running server with all ports, and a PATH with the programs of this Python.
    """
    ports = ("--operations-port", "0", "--metrics-port", "0")
    async with started(*simulated(), "--fronts", "1", "--model-name", "demo", *ports) as service:
        metrics = (
            (await service.printed_address("metrics"))
            .removeprefix("http://")
            .removesuffix("/metrics")
        )
        yield {
            **clean_environment(),
            "ADDRESS": service.address,
            "OPERATIONS": await service.printed_address("operations"),
            "METRICS": metrics,
        }


async def run(command: str, environment: dict[str, str]) -> tuple[int | None, str, str]:
    """Run a block of commands in a shell; return its exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", command),
        cwd=REPOSITORY,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(TEST_TIMEOUT_S):
        stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("command", "reported"), PAIRS, ids=lambda text: text.split("\n")[0][:60])
async def test_a_documented_block_has_its_documented_output(
    command: str, reported: str, environment: dict[str, str], tmp_path: Path
) -> None:
    code, output, errors = await run(command, {**environment, "XDG_CACHE_HOME": str(tmp_path)})
    assert code == 0, f"{output}\n{errors}"
    assert output
    for line in reported.splitlines():
        assert line in output, output


def test_every_block_is_run_or_states_that_it_is_not() -> None:
    before, heading, after = TEXT.partition("\n## Not run here\n")
    assert heading
    assert len(PAIRS) == before.count("```sh test\n") >= 15
    # The only block that does not run sets PATH and the addresses, as the fixture does.
    assert re.findall(r"^```sh\n(.*?)^```$", before, re.M | re.S) == [
        ". .venv/bin/activate\n"
        "export ADDRESS=127.0.0.1:50051 OPERATIONS=127.0.0.1:50052 METRICS=127.0.0.1:50053\n"
    ]
    assert "```sh test" not in after


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ("list --ca /nonexistent.pem", "--ca: /nonexistent.pem: No such file or directory"),
        ("list --ca README.md", "--ca: README.md: no certificate in PEM"),
        ("list --header nocolon", "--header: not NAME: VALUE: 'nocolon'"),
        ("list --header 'a b: c'", "--header: a name has letters, digits and _ . - only: 'a b'"),
        ("list --header 'a: \u00e4'", "--header: a: a value is printable ASCII"),
        ("list --header 'a-bin: !'", "--header: a-bin: not base64"),
        ("list penstock.v1.ModelService", "list takes no arguments"),
        ("describe", "describe requires a name"),
        ("describe penstock.v1.TextPrompt '{}'", "describe takes no data"),
    ],
)
async def test_invalid_arguments_are_reported(words: str, reported: str) -> None:
    command = f"python clients/examples/reflect.py 127.0.0.1:1 {words}"
    code, output, errors = await run(command, clean_environment())
    assert (code, output) == (2, "")
    assert "Traceback" not in errors
    assert f"reflect.py: error: {'argument ' if reported[0] == '-' else ''}{reported}" in errors


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ("call penstock.v1.ModelService/Nope", "no such method; penstock.v1.ModelService has "),
        ("call penstock.v1.Nope/GetModel", "Couldn't find service penstock.v1.Nope"),
        ("call ListModels", "not SERVICE/METHOD"),
        ("describe penstock.v1.Nope", "Couldn't find symbol penstock.v1.Nope"),
        ("describe penstock.v1.TextPrompt.text", "not a service, a message or an enumeration"),
    ],
)
async def test_a_name_that_the_server_lacks_is_reported(
    words: str, reported: str, environment: dict[str, str]
) -> None:
    command = f'python clients/examples/reflect.py "$ADDRESS" {words}'
    code, output, errors = await run(command, environment)
    assert (code, output) == (1, "")
    assert errors.startswith(f"{words.split()[1]}: {reported}")


async def _metadata_of(words: str) -> list[tuple[str, str | bytes]]:
    """Return the metadata that `reflect.py list` sends with the arguments `words`."""
    seen: list[tuple[str, str | bytes]] = []

    class Watch(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
            seen.extend(handler_call_details.invocation_metadata)
            return await continuation(handler_call_details)

    server = grpc.aio.server(interceptors=[Watch()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        await run(
            f"python clients/examples/reflect.py 127.0.0.1:{port} list {words}", clean_environment()
        )
    finally:
        await server.stop(None)
    return seen


async def test_headers_are_sent_with_the_call() -> None:
    seen = await _metadata_of("--header 'X-Team: a: b' --header 'x-key-bin: AP8='")
    assert ("x-team", "a: b") in seen
    assert ("x-key-bin", b"\x00\xff") in seen


async def test_tools_with_tls_and_a_token(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    issued = authority.issue("penstock")
    token = "5a" * 32
    digest = hashlib.sha256(token.encode()).hexdigest()
    policy = tmp_path / "policy.toml"
    policy.write_text(
        "version = 1\n[tenants.operators]\n"
        f'rights = ["generate", "inspect"]\ntokens = [{{ sha256 = "{digest}" }}]\n'
    )
    tls = ("--tls-cert", str(issued.cert_file), "--tls-key", str(issued.key_file))
    async with started(
        *simulated(), "--fronts", "1", *tls, "--policy-file", str(policy)
    ) as service:
        known = {
            "ADDRESS": service.address,
            "CA": str(authority.ca_file),
            "TOKEN": token,
            "XDG_CACHE_HOME": str(tmp_path),
        }
        reflect = 'python clients/examples/reflect.py "$ADDRESS" list --ca "$CA"'
        header = '"authorization: Bearer $TOKEN"'
        headers = f"--reflect-header {header} --header {header}"
        buf = f'buf curl --protocol grpc --cacert "$CA" {headers}'
        method = "penstock.v1.GenerationService/GenerateOnce"
        data = '{"generation": {"text_prompt": {"text": "To be"}, "stopping": {"max_tokens": 3}}}'
        outcomes = [
            await run(command, {**clean_environment(), **known})
            for command in (
                reflect,
                f"{reflect} --header {header}",
                f"{buf} \"https://$ADDRESS/{method}\" --data '{data}'",
                'penstock health --address "$ADDRESS" --ca "$CA"',
            )
        ]
    rejected, listed, called, health = outcomes
    assert rejected[0] == 1
    assert rejected[2].startswith("UNAUTHENTICATED")
    assert listed[0] == 0
    assert method in listed[1]
    assert called[0] == 0, called[2]
    assert "FINISH_REASON_LENGTH" in called[1]
    assert health[:2] == (0, "SERVING\n")
