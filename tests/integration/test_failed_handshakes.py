"""A connection without TLS to a TLS port, or a failed handshake, leaves no line in the log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import ssl
from pathlib import Path

import pytest

from penstock.client import NO_RETRY, Client, TlsConfig, TokenPrompt
from support.authority import Issued
from support.security_files import SecurityFiles
from support.service import Service, simulated, started
from support.timeout import TEST_TIMEOUT_S

GARBAGE = (
    b"GET / HTTP/1.0\r\n\r\n",
    b"\x16\x03\x01\xff\xff" + bytes(64),
    b"PRI * HTTP/2.0\r\n\r\n",
)


def foreign_context(ca_file: Path, shown: Issued | None) -> ssl.SSLContext:
    """Return a TLS context with the client certificate `shown`, or without one."""
    context = ssl.create_default_context(cafile=str(ca_file))
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    if shown is not None:
        context.load_cert_chain(shown.cert_file, shown.key_file)
    return context


async def knock(port: int, data: bytes, context: ssl.SSLContext | None = None) -> None:
    """Connect, send bytes, and wait until the server closes the connection."""
    with contextlib.suppress(OSError):
        name = None if context is None else "made-up.test"
        async with asyncio.timeout(TEST_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname=name
            )
            writer.write(data)
            await reader.read()
        writer.close()


async def knock_in_all_ways(service: Service, security_files: SecurityFiles) -> None:
    operations = await service.printed_address("operations")
    forged = security_files.authority.issue("forged")
    contexts = [
        foreign_context(security_files.authority.ca_file, shown) for shown in (None, forged)
    ]
    for address in (service.address, operations):
        port = int(address.rpartition(":")[2])
        for data in GARBAGE:
            await knock(port, data)
        for context in contexts:
            await knock(port, b"", context)


async def test_failed_handshakes_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    security_files = SecurityFiles(tmp_path)
    mine = security_files.clients.issue("acme")
    options = (
        *("--tls-cert", str(security_files.cert_file), "--tls-key", str(security_files.key_file)),
        *("--tls-client-ca", str(security_files.clients.ca_file)),
        *("--policy-file", str(security_files.policy_file)),
        *("--fronts", "1", "--operations-port", "0", "--log-format", "json"),
    )
    tls = TlsConfig(ca=security_files.authority.ca_file, cert=mine.cert_file, key=mine.key_file)
    async with started(*simulated(), *options) as service:
        await knock_in_all_ways(service, security_files)
        async with Client(service.address, tls=tls, retry=NO_RETRY) as client:
            result = await client.generate_once(
                TokenPrompt(ids=(5, 6, 7, 8)),
                max_tokens=4,
                ignore_eos=True,
                deadline_s=TEST_TIMEOUT_S,
            )
        assert result.finished.usage.num_completion_tokens == 4
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
    assert service.stderr
    logged = [json.loads(line) for line in service.stderr]
    assert not [line for line in logged if line["level"] in ("warning", "error")]
