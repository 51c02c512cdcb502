"""The credentials of a call are checked once, and the result is valid for the whole call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock.server.rpc.operations_service import OperationsServer
from penstock.server.security.rights import Caller, Right
from penstock.server.security.security import Security
from penstock.server.text.model_text import ModelText
from support.fronts import open_channel, serving
from support.generate_requests import text_request
from support.operations_server import FakeOperations
from support.security_files import ACME, OPERATOR, SecurityFiles, bearer_metadata
from support.timeout import TEST_TIMEOUT_S

FRONT_METHODS = (
    "penstock.v1.GenerationService/Generate",
    "penstock.v1.GenerationService/GenerateOnce",
    "penstock.v1.GenerationService/Cancel",
    "penstock.v1.GenerationService/Resume",
    "penstock.v1.ModelService/ListModels",
    "penstock.v1.ModelService/Tokenize",
    "penstock.v1.ModelService/LoadModel",
    "grpc.channelz.v1.Channelz/GetServers",
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
)
OPERATIONS_METHODS = (
    "penstock.v1.OperationsService/GetStats",
    "penstock.v1.OperationsService/WatchStats",
    "penstock.v1.OperationsService/SetLogLevel",
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
)


def for_all(security_files: SecurityFiles) -> Security:
    """Return the Security of a policy that grants the operator every right."""
    security_files.tokens()
    rights = ", ".join(f'"{right.value}"' for right in Right)
    policy = security_files.policy_file.read_text()
    own = '["inspect", "operations_read", "operations_write", "metrics"]'
    assert own in policy
    security_files.policy_file.write_text(policy.replace(own, f"[{rights}]"))
    return Security(security_files.config())


def after_each_judgement(
    security: Security, monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]
) -> None:
    """Call `do` after each authentication."""
    authenticator = security.authenticator
    assert authenticator is not None
    original = authenticator.identify

    def identify(*shown: Any) -> Caller:
        caller = original(*shown)
        do()
        return caller

    monkeypatch.setattr(authenticator, "identify", identify)


async def call_once(channel: grpc.aio.Channel, path: str) -> None:
    """Make one call with an empty message; read until its end or its first response."""
    begin: Any = channel.stream_stream(f"/{path}")
    call = begin(iter([b""]), metadata=bearer_metadata(OPERATOR), timeout=TEST_TIMEOUT_S)
    async with asyncio.timeout(TEST_TIMEOUT_S):
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                break
        call.cancel()


async def test_each_call_of_a_front_is_authenticated_once(
    text: ModelText, security_files: SecurityFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    security, judged = for_all(security_files), list[str]()
    path = ""
    after_each_judgement(security, monkeypatch, lambda: judged.append(path))
    async with serving(text, security=security) as served, open_channel(served.address) as channel:
        for path in FRONT_METHODS:
            await call_once(channel, path)
    assert judged == list(FRONT_METHODS)


async def test_each_call_of_operators_is_authenticated_once(
    security_files: SecurityFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    security, judged = for_all(security_files), list[str]()
    path = ""
    after_each_judgement(security, monkeypatch, lambda: judged.append(path))
    server = OperationsServer(FakeOperations(), "127.0.0.1", 0, security=security)
    port = await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            for path in OPERATIONS_METHODS:
                await call_once(channel, path)
    finally:
        await server.stop()
    assert judged == list(OPERATIONS_METHODS)


async def test_a_policy_replaced_during_a_call_does_not_reject_an_admitted_request(
    text: ModelText, security_files: SecurityFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = security_files.tokens()
    acme = "[tenants.acme]"
    without = security_files.policy_file.read_text().replace(acme, f"{acme}\nrights = []")

    def replace_policy() -> None:
        security_files.policy_file.write_text(without + "\n# moved\n")
        security.poll()

    after_each_judgement(security, monkeypatch, replace_policy)
    async with serving(text, security=security) as served:
        request = text_request(request_id="r")
        call = served.stub.Generate(request, metadata=bearer_metadata(ACME))
        (spec,) = await served.port.next_submission()
        assert spec.tenant == "acme"
        call.cancel()
        late = served.stub.Generate(request, metadata=bearer_metadata(ACME))
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await anext(aiter(late))
        assert rejected.value.code() is grpc.StatusCode.PERMISSION_DENIED
