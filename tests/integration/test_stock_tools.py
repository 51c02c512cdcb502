"""Each command of docs/stock-tools.md does against a live server what the page says."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.authority import Authority
from support.service import simulated, started

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "stock-tools.md").read_text(encoding="utf-8")
PAIRS = re.findall(r"^```sh test\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", TEXT, re.M | re.S)
PATIENCE_S = 60.0


def with_programs() -> dict[str, str]:
    """Our environment, with the programs that were installed beside Python."""
    inherited = {key: value for key, value in os.environ.items() if key[:9] != "PENSTOCK_"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
    return {**inherited, "PATH": path}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def environment() -> AsyncIterator[dict[str, str]]:
    """What the page's first block sets, for a server with every port, and our programs."""
    doors = ("--operations-port", "0", "--metrics-port", "0")
    async with started(*simulated(), "--fronts", "1", "--model-name", "demo", *doors) as service:
        metrics = (await service.door("metrics")).removeprefix("http://").removesuffix("/metrics")
        yield {
            **with_programs(),
            "ADDRESS": service.address,
            "OPERATIONS": await service.door("operations"),
            "METRICS": metrics,
        }


async def run(command: str, environment: dict[str, str]) -> tuple[int | None, str, str]:
    """A block in a shell: its exit code, what it said, and what it complained of."""
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", command),
        cwd=REPOSITORY,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("command", "told"), PAIRS, ids=lambda text: text.split("\n")[0][:60])
async def test_the_block_does_what_it_shows(
    command: str, told: str, environment: dict[str, str], tmp_path: Path
) -> None:
    code, output, errors = await run(command, {**environment, "XDG_CACHE_HOME": str(tmp_path)})
    assert code == 0, f"{output}\n{errors}"
    assert output
    for line in told.splitlines():
        assert line in output, output


def test_every_block_is_run_or_says_that_it_is_not() -> None:
    before, heading, after = TEXT.partition("\n## Not run here\n")
    assert heading
    assert len(PAIRS) == before.count("```sh test\n") >= 15
    # The one that sets the addresses.
    assert re.findall(r"^```sh\n(.*)$", before, re.M) == [
        "export ADDRESS=127.0.0.1:50051 OPERATIONS=127.0.0.1:50052 METRICS=127.0.0.1:50053"
    ]
    assert "```sh test" not in after


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
        data = '{"generation": {"text": {"text": "To be"}, "stopping": {"max_tokens": 3}}}'
        outcomes = [
            await run(command, {**with_programs(), **known})
            for command in (
                reflect,
                f"{reflect} --header {header}",
                f"{buf} \"https://$ADDRESS/{method}\" --data '{data}'",
                'penstock health --address "$ADDRESS" --ca "$CA"',
            )
        ]
    refused, listed, called, health = outcomes
    assert refused[0] == 1
    assert refused[2].startswith("UNAUTHENTICATED")
    assert listed[0] == 0
    assert method in listed[1]
    assert called[0] == 0, called[2]
    assert "FINISH_REASON_LENGTH" in called[1]
    assert health[:2] == (0, "SERVING\n")
