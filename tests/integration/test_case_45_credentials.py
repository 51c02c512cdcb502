"""Case 45: over real sockets, valid certificates and tokens are accepted, and others rejected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pool

from penstock.conventions import NO_CREDENTIALS
from penstock.scheduler.request import FinishReason
from penstock.server.front.config import FrontConfig
from penstock.server.rpc.operations_service import OperationsServer
from penstock.server.security.security import Security
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import collect, open_channel, rich_error, serving
from support.generate_requests import text_request
from support.operations_server import FakeOperations
from support.security_files import (
    ACME,
    ALL_TOKENS,
    EXPIRED,
    MUTE,
    OPERATOR,
    OTHER,
    VIEWER,
    SecurityFiles,
    bearer_metadata,
)
from support.timeout import TEST_TIMEOUT_S

C = grpc.StatusCode
ALONE = (("grpc.use_local_subchannel_pool", 1),)
HEALTH = "/grpc.health.v1.Health/Check"
FRONT_SERVICES = ("GenerationService", "ModelService")
INSPECTION = (
    "/grpc.channelz.v1.Channelz/GetServers",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
GARBAGE = b"\x0a\xff\xff\xff\x7fgarbage"


def request(priority: int = 0) -> pb.GenerateRequest:
    message = text_request(request_id="r")
    message.scheduling.priority = priority
    return message


def methods_of(service: str) -> list[tuple[str, bool]]:
    """Return (path, whether the client sends a stream) of each method of the service."""
    found = descriptor_pool.Default().FindServiceByName(f"penstock.v1.{service}")
    return [
        (f"/{found.full_name}/{method.name}", method.client_streaming) for method in found.methods
    ]


async def raw_code(
    channel: grpc.aio.Channel, path: str, data: bytes | None = b"", *, token: str | None = None
) -> grpc.StatusCode:
    """Call any method with these bytes (None: nothing is sent); return the status.

    The method's type does not matter on the wire. If a call ends while the client sends, gRPC core
    may report INTERNAL instead of the status; then the call is repeated.
    """
    begin: Any = channel.stream_stream(path)
    metadata = () if token is None else bearer_metadata(token)
    for _ in range(20):
        sent = _nothing_yet() if data is None else iter([data])
        call = begin(sent, metadata=metadata, timeout=TEST_TIMEOUT_S)
        async with asyncio.timeout(TEST_TIMEOUT_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    call.cancel()
                    return C.OK
            reported = f"{await call.details()} {await call.trailing_metadata()}"
            assert not [secret for secret in ALL_TOKENS if secret in reported]
            code: grpc.StatusCode = await call.code()
        if code is not C.INTERNAL or "grpc-status-details-bin" in reported:
            return code
    raise AssertionError("its core never got the message out")


async def _nothing_yet() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def health_code(address: str, credentials: grpc.ChannelCredentials | None) -> Any:
    async with open_channel(address, credentials, ALONE) as channel:
        return await raw_code(channel, HEALTH)


@pytest.mark.parametrize("shown", ["good", "none", "foreign", "expired", "plain text"])
async def test_case_45_client_certificates(
    text: ModelText, security_files: SecurityFiles, shown: str
) -> None:
    security = Security(security_files.config(is_mutual=True))
    foreign = security_files.authority.issue("acme-foreign")
    credentials = {
        "good": security_files.channel_credentials(security_files.clients.issue("acme")),
        "none": security_files.channel_credentials(),
        "foreign": security_files.channel_credentials(foreign),
        "expired": security_files.channel_credentials(
            security_files.clients.issue("late", is_expired=True)
        ),
        "plain text": None,
    }[shown]
    async with serving(text, security=security, credentials=credentials) as served:
        if shown != "good":
            assert await raw_code(served.channel, HEALTH) is C.UNAVAILABLE
            assert served.server.num_live_requests == 0
            return
        call = served.stub.Generate(request())
        (spec,) = await served.port.next_submission()
        assert spec.tenant == "acme", "by the certificate alone"
        served.port.finish(spec.key)
        await collect(call)


async def test_case_45_a_certificate_that_the_policy_does_not_know(
    text: ModelText, security_files: SecurityFiles
) -> None:
    security = Security(security_files.config(is_mutual=True))
    other = security_files.channel_credentials(security_files.clients.issue("other"))
    async with serving(text, security=security, credentials=other) as served:
        path = "/penstock.v1.ModelService/GetModel"
        assert await raw_code(served.channel, path) is C.UNAUTHENTICATED
        assert await raw_code(served.channel, path, token=OTHER) is C.OK
    acme = security_files.channel_credentials(security_files.clients.issue("acme"))
    async with serving(text, security=security, credentials=acme) as served:
        assert await raw_code(served.channel, path, token=OTHER) is C.UNAUTHENTICATED


async def test_case_45_bearer_tokens(text: ModelText, security_files: SecurityFiles) -> None:
    security = security_files.tokens()
    issuer = security_files.issuer
    async with serving(text, security=security) as served:
        for path, wanted in (
            ("/penstock.v1.ModelService/GetModel", C.OK),
            ("/penstock.v1.GenerationService/Generate", C.INVALID_ARGUMENT),
        ):
            for token, code in (
                (None, C.UNAUTHENTICATED),
                ("", C.UNAUTHENTICATED),
                ("wrong", C.UNAUTHENTICATED),
                (ACME[:-1], C.UNAUTHENTICATED),
                (EXPIRED, C.UNAUTHENTICATED),
                (issuer.token(exp=1.0), C.UNAUTHENTICATED),
                (issuer.token() + "x", C.UNAUTHENTICATED),
                (issuer.token(sub="unlisted"), C.PERMISSION_DENIED),
                (MUTE, C.PERMISSION_DENIED),
                (OPERATOR, C.PERMISSION_DENIED),
                (ACME, wanted),
                (issuer.token(), wanted),
            ):
                assert await raw_code(served.channel, path, token=token) is code, token
        assert await raw_code(served.channel, HEALTH) is C.OK, "probes have no credentials"


async def test_case_45_a_token_is_valid_only_for_its_tenant(
    text: ModelText, security_files: SecurityFiles
) -> None:
    async with serving(text, security=security_files.tokens()) as served:
        forged = (*bearer_metadata(ACME), ("x-tenant", "other"), ("tenant", "other"))
        call = served.stub.Generate(request(), metadata=forged)
        (spec,) = await served.port.next_submission()
        assert spec.tenant == "acme"
        for other, code in ((OTHER, C.NOT_FOUND), (MUTE, C.PERMISSION_DENIED)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.stub.Cancel(
                    pb.CancelRequest(request_id="r"), metadata=bearer_metadata(other)
                )
            assert caught.value.code() is code
        assert served.port.cancelled == []
        await served.stub.Cancel(pb.CancelRequest(request_id="r"), metadata=bearer_metadata(ACME))
        assert await served.port.next_cancel() == ((spec.key,), FinishReason.CANCELLED)
        served.port.finish(spec.key, FinishReason.CANCELLED)
        await collect(call)


async def test_case_45_rejections_carry_a_reason_and_no_secret(
    text: ModelText, security_files: SecurityFiles
) -> None:
    async with serving(text, security=security_files.tokens()) as served:
        for token, reason, message in (
            (None, "UNAUTHENTICATED", NO_CREDENTIALS),
            ("wrong-Kanarie", "UNAUTHENTICATED", "invalid credentials"),
            (MUTE, "PERMISSION_DENIED", "the tenant lacks the right generate"),
        ):
            metadata = None if token is None else bearer_metadata(token)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(served.stub.Generate(request(), metadata=metadata))
            assert caught.value.details() == message
            error = rich_error(caught.value)
            assert (error.info.reason, error.info.domain) == (reason, "penstock.dev")
            assert not error.info.metadata
            assert error.retry_s is None
            assert "Kanarie" not in repr(caught.value)


@pytest.mark.parametrize("token", [None, "wrong", MUTE])
async def test_nothing_is_served_to_unauthenticated_callers(
    text: ModelText, security_files: SecurityFiles, token: str | None
) -> None:
    wanted = C.PERMISSION_DENIED if token == MUTE else C.UNAUTHENTICATED
    security = security_files.tokens()
    paths = [path for name in FRONT_SERVICES for path, _ in methods_of(name)]
    async with serving(text, security=security) as served:
        for path in (*paths, *INSPECTION):
            # The server neither waits for a message nor parses it.
            for data in (None, GARBAGE):
                code = await raw_code(served.channel, path, data, token=token)
                assert code is wanted, path
    operations = OperationsServer(FakeOperations(), "127.0.0.1", 0, security=security)
    address = f"127.0.0.1:{await operations.start()}"
    try:
        async with open_channel(address) as channel:
            operators = [path for path, _ in methods_of("OperationsService")]
            for path in (*operators, *INSPECTION[1:]):
                for data in (None, GARBAGE):
                    code = await raw_code(channel, path, data, token=token)
                    assert code is wanted, path
            assert await raw_code(channel, HEALTH) is C.OK
    finally:
        await operations.stop()


async def test_operators_have_their_own_rights(security_files: SecurityFiles) -> None:
    security = security_files.tokens()
    fake = FakeOperations()
    operations = OperationsServer(fake, "127.0.0.1", 0, security=security)
    address = f"127.0.0.1:{await operations.start()}"
    look, lever = "GetStats", "Drain"
    try:
        async with open_channel(address) as channel:
            for token, code_of_look, code_of_lever in (
                (ACME, C.PERMISSION_DENIED, C.PERMISSION_DENIED),
                (VIEWER, C.OK, C.PERMISSION_DENIED),
                (OPERATOR, C.OK, C.OK),
            ):
                for name, code in ((look, code_of_look), (lever, code_of_lever)):
                    path = f"/penstock.v1.OperationsService/{name}"
                    assert await raw_code(channel, path, token=token) is code
        assert [reported[0] for reported in fake.commands] == ["drain"], "by the one who may"
    finally:
        await operations.stop()


async def test_inspection_requires_a_right(text: ModelText, security_files: SecurityFiles) -> None:
    async with serving(text, security=security_files.tokens()) as served:
        for path in INSPECTION:
            assert await raw_code(served.channel, path, token=ACME) is C.PERMISSION_DENIED
            assert await raw_code(served.channel, path, token=OPERATOR) is C.OK


@pytest.mark.parametrize(("asked", "given"), [(100, 5), (5, 5), (4, 4), (-100, -100)])
async def test_the_policy_limits_a_tenants_priority(
    text: ModelText, security_files: SecurityFiles, asked: int, given: int
) -> None:
    async with serving(text, security=security_files.tokens()) as served:
        call = served.stub.Generate(request(asked), metadata=bearer_metadata(ACME))
        (spec,) = await served.port.next_submission()
        assert spec.priority == given
        assert served.server.front.counters.num_lowered_priorities == (asked > given)
        served.port.finish(spec.key)
        await collect(call)


async def next_event(call: Any) -> pb.MultiplexResponse:
    async with asyncio.timeout(TEST_TIMEOUT_S):
        response: pb.MultiplexResponse = await call.read()
        return response


async def test_a_shared_call_does_not_outlive_its_token(
    text: ModelText, security_files: SecurityFiles
) -> None:
    security = security_files.tokens()
    async with serving(text, security=security) as served:
        call = served.stub.Multiplex(metadata=bearer_metadata(ACME))
        await call.write(
            pb.MultiplexRequest(submit=pb.MultiplexSubmit(key=1, generation=request(9)))
        )
        (spec,) = await served.port.next_submission()
        assert (spec.tenant, spec.priority) == ("acme", 5)
        assert served.server.front.counters.num_lowered_priorities == 1
        without = security_files.policy_file.read_text().replace("[tenants.acme]", "[tenants.heir]")
        security_files.policy_file.write_text(without + "\n# moved\n")
        security.poll()
        again = request()
        again.request_id = "again"
        await call.write(pb.MultiplexRequest(submit=pb.MultiplexSubmit(key=2, generation=again)))
        rejected = None
        while rejected is None:
            response = await next_event(call)
            rejected = next((e for e in response.events if e.key == 2), None)
        assert rejected.error.code == C.UNAUTHENTICATED.value[0]
        call.cancel()


async def certificate_of(address: str) -> bytes:
    """Return the certificate that the server presents, as PEM, without verifying it."""
    import ssl

    host, _, port = address.rpartition(":")
    text = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
    return text.strip().encode()


async def test_certificates_are_replaced_without_a_restart(
    text: ModelText, security_files: SecurityFiles, caplog: pytest.LogCaptureFixture
) -> None:
    security = Security(security_files.config(has_policy=False, has_tls=True))
    first = security_files.cert_file.read_bytes()
    old = security_files.channel_credentials()
    async with serving(text, security=security, credentials=old) as served:
        assert await certificate_of(served.address) == first.strip()
        call = served.stub.Generate(request())
        (spec,) = await served.port.next_submission()
        # The key does not fit yet, as between two writes: the old pair stays, reported once.
        second = security_files.authority.issue("second")
        security_files.cert_file.write_bytes(second.cert)
        security.poll()
        security.poll()
        assert await certificate_of(served.address) == first.strip()
        assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1
        security_files.install(second)
        security.poll()
        assert await certificate_of(served.address) == second.cert.strip()
        served.port.finish(spec.key)
        assert len(await collect(call)) > 0, "connections that were there go on"
        security_files.key_file.unlink()
        security_files.cert_file.write_bytes(b"nonsense")
        security.poll()
        assert await health_code(served.address, old) is C.OK


async def test_the_authority_of_clients_is_replaced_too(
    text: ModelText, security_files: SecurityFiles
) -> None:
    security = Security(security_files.config(has_policy=False, is_mutual=True))
    gone = security_files.channel_credentials(security_files.clients.issue("acme"))
    came = security_files.channel_credentials(security_files.authority.issue("acme"))
    async with serving(text, security=security, credentials=gone) as served:
        assert await health_code(served.address, gone) is C.OK
        assert await health_code(served.address, came) is C.UNAVAILABLE
        security_files.clients.ca_file.write_bytes(security_files.authority.ca)
        security.poll()
        assert await health_code(served.address, gone) is C.UNAVAILABLE
        assert await health_code(served.address, came) is C.OK


def test_a_proxys_header_and_credentials_exclude_each_other(
    text: ModelText, security_files: SecurityFiles
) -> None:
    from penstock.server.rpc.server import FrontServer

    with pytest.raises(ValueError, match="tenant_metadata_key"):
        FrontServer(
            text, FrontConfig(tenant_metadata_key="x-tenant"), security=security_files.tokens()
        )
    with pytest.raises(ValueError, match="exclude each other"):
        Security(security_files.config(), is_behind_proxy=True)


async def test_a_policy_limits_the_tenants_of_a_proxy(
    text: ModelText, security_files: SecurityFiles
) -> None:
    security_files.policy_file.write_text(
        'version = 1\n[tenants.acme]\nmax_priority = 3\n[tenants.mute]\nrights = ["models"]\n'
    )
    security = Security(security_files.config(), is_behind_proxy=True)
    config = FrontConfig(acceptance_delay_s=0.0, tenant_metadata_key="x-tenant")
    async with serving(text, config, security=security) as served:
        call = served.stub.Generate(request(50), metadata=(("x-tenant", "acme"),))
        (spec,) = await served.port.next_submission()
        assert (spec.tenant, spec.priority) == ("acme", 3)
        served.port.finish(spec.key)
        await collect(call)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(served.stub.Generate(request(), metadata=(("x-tenant", "mute"),)))
        assert caught.value.code() is C.PERMISSION_DENIED
