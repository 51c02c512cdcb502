"""A service with TLS and a policy, used by clients and operators."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.client import (
    NO_RETRY,
    Client,
    OperationsClient,
    PermissionDenied,
    RequestNotFound,
    TlsConfig,
    TokenPrompt,
    Unauthenticated,
    Unavailable,
)
from support.authority import replace_file
from support.security_files import (
    ACME,
    ALL_TOKENS,
    EXPIRED,
    OPERATOR,
    OTHER,
    VIEWER,
    SecurityFiles,
    digest,
)
from support.service import Service, simulated, started
from support.timeout import TEST_TIMEOUT_S

PROMPT = TokenPrompt(ids=(5, 6, 7, 8))
NEW, WRONG = "new-Kanarie-token", "wrong-Kanarie-token"
ENDPOINT_OPTIONS = ("--operations-port", "0", "--metrics-port", "0")


async def command(service: Service, *arguments: str) -> tuple[int, str]:
    """Run a command as a process; return its exit code and output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.tools", *arguments),
        *("--address", service.address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    async with asyncio.timeout(TEST_TIMEOUT_S):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def generated(client: Client) -> int:
    result = await client.generate_once(
        PROMPT, max_tokens=4, ignore_eos=True, deadline_s=TEST_TIMEOUT_S
    )
    return result.finished.usage.num_completion_tokens


@pytest.fixture
def security_files(tmp_path: Path) -> SecurityFiles:
    security_files = SecurityFiles(tmp_path)
    security_files.tokens()
    return security_files


@dataclass
class Secured:
    """A service with authentication. Collects everything that it and its clients report."""

    service: Service
    security_files: SecurityFiles
    tls: TlsConfig
    reported: list[str] = field(default_factory=list[str])

    def client(self, token: str | None) -> Client:
        return Client(self.service.address, token=token, tls=self.tls, retry=NO_RETRY)

    async def fails(self, token: str | None, kind: type[Exception]) -> None:
        async with self.client(token) as client:
            with pytest.raises(kind) as caught:
                await generated(client)
            self.reported.append(repr(caught.value) + str(caught.value))

    async def tenants_are_distinguished(self) -> None:
        async with (
            Client(self.service.address, token=lambda: ACME, tls=self.tls) as client,
            self.client(OTHER) as other,
        ):
            assert await generated(client) == 4
            stream = client.generate(PROMPT, request_id="mine", max_tokens=400, ignore_eos=True)
            await anext(stream)
            with pytest.raises(RequestNotFound):
                await other.cancel("mine")
            await client.cancel("mine")
            await stream.aclose()

    async def unauthenticated_callers_are_rejected(self) -> None:
        for token in (None, WRONG, EXPIRED, self.security_files.issuer.token(exp=1.0)):
            await self.fails(token, Unauthenticated)
        await self.fails(VIEWER, PermissionDenied)
        async with Client(self.service.address, retry=NO_RETRY) as plain:
            with pytest.raises(Unavailable):
                await plain.health(deadline_s=TEST_TIMEOUT_S)

    async def operators_look(self) -> None:
        address, tls = await self.service.printed_address("operations"), self.tls
        async with OperationsClient(address, token=OPERATOR, tls=tls) as operations:
            self.reported.append(repr(await operations.get_stats()))
            self.reported.append((await operations.get_flight_record()).decode("latin-1"))
        async with OperationsClient(address, token=VIEWER, tls=tls) as viewer:
            await viewer.get_stats()
            with pytest.raises(PermissionDenied):
                await viewer.drain()
        self.reported.append(
            await scraped(await self.service.printed_address("metrics"), self.security_files)
        )

    async def commands_connect(self) -> None:
        folder = self.security_files.folder
        token_file = folder / "token"
        token_file.write_text(f"{ACME}\n")
        wrong_file = folder / "wrong"
        wrong_file.write_text(WRONG)
        ca = ("--ca", str(self.security_files.authority.ca_file))
        for arguments, code, word in (
            (("health", *ca), 0, "SERVING"),
            (("models", *ca, "--token-file", str(token_file)), 0, "demo"),
            (("models", *ca), 1, "UNAUTHENTICATED: no credentials: "),
            (("models", *ca), 1, "; set --token-file"),
            (("models", *ca, "--token-file", str(wrong_file)), 1, "UNAUTHENTICATED: invalid"),
            (("models", "--token-file", str(folder / "none")), 2, "--token-file"),
            (("verify", "--ca", "x", "--serve"), 2, "--ca cannot be combined with --serve"),
            (("health", *ca, "--server-name", "else.test", "--deadline", "60"), 3, "UNAVAILABLE"),
            (("health", *ca, "--server-name", "localhost"), 0, "SERVING"),
        ):
            found, out = await command(self.service, *arguments)
            assert (found, word in out) == (code, True), out
            self.reported.append(out)

    async def tokens_are_changed(self) -> None:
        text = self.security_files.policy_file.read_text().replace(digest(ACME), digest(NEW))
        replace_file(self.security_files.policy_file, text)
        await self.service.until_logged("front", "a new policy is in force")
        await self.fails(ACME, Unauthenticated)
        async with self.client(NEW) as client:
            assert await generated(client) == 4


async def test_case_46_no_output_contains_a_credential(security_files: SecurityFiles) -> None:
    tls = TlsConfig(ca=security_files.authority.ca_file)
    files = ("--tls-cert", str(security_files.cert_file), "--tls-key", str(security_files.key_file))
    policy = ("--policy-file", str(security_files.policy_file))
    options = ("--fronts", "1", "--log-level", "debug", *ENDPOINT_OPTIONS, *files, *policy)
    async with started(*simulated(), *options) as service:
        secured = Secured(service, security_files, tls)
        await secured.tenants_are_distinguished()
        await secured.unauthenticated_callers_are_rejected()
        await secured.operators_look()
        await secured.commands_connect()
        await secured.tokens_are_changed()
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
    everything = "".join((*secured.reported, *service.stdout, *service.stderr))
    assert "caller rejected: an unknown token" in everything
    assert not [secret for secret in (*ALL_TOKENS, NEW, WRONG) if secret in everything]
    assert "Bearer" not in everything


async def scraped(url: str, security_files: SecurityFiles) -> str:
    assert url.startswith("https://")
    context = ssl.create_default_context(cafile=str(security_files.authority.ca_file))

    def read() -> str:
        with urllib.request.urlopen(url, context=context, timeout=TEST_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
            return text

    page = await asyncio.to_thread(read)
    assert "penstock_" in page
    return page
