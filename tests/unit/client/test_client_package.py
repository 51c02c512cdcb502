"""The public names of the client package, its addresses, its trace context and its
channel settings.
"""

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import penstock.client
from penstock.client import (
    ChannelConfig,
    Client,
    PoolConfig,
    SyncClient,
    SyncOperationsClient,
    TraceContext,
    trace_context,
)
from penstock.client.call_settings import CallSettings
from penstock.client.channel import grpc_target
from penstock.client.retry import NO_RETRY
from penstock.server.cli import connection

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_all_names_exactly_what_is_public() -> None:
    public = {
        name
        for name, value in vars(penstock.client).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }

    assert len(penstock.client.__all__) == len(set(penstock.client.__all__))
    assert set(penstock.client.__all__) == public


def test_command_line_and_client_agree_on_the_address() -> None:
    assert connection.default_address({}) == penstock.client.DEFAULT_ADDRESS


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("localhost", "localhost:50051"),
        ("localhost:1234", "localhost:1234"),
        ("127.0.0.1", "127.0.0.1:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:1234", "[::1]:1234"),
        ("dns:///localhost", "dns:///localhost"),
        ("dns:localhost", "dns:localhost"),
        ("unix:/run/penstock.sock", "unix:/run/penstock.sock"),
        ("unix-abstract:penstock", "unix-abstract:penstock"),
        ("ipv4:127.0.0.1:1,127.0.0.2:2", "ipv4:127.0.0.1:1,127.0.0.2:2"),
    ],
)
def test_a_host_alone_means_the_default_port(address: str, target: str) -> None:
    assert grpc_target(address) == target


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("localhost:", "no port after the colon"),
        ("[::1]:", "no port after the colon"),
        ("localhost:0", "from 1 to 65535"),
        ("localhost:65536", "from 1 to 65535"),
        ("localhost:grpc", "must be HOST"),
        (":50051", "must be HOST"),
        ("", "must be HOST"),
        ("::1", "must be HOST"),
        ("http://localhost:50051", "must be HOST"),
        ("local host", "must be HOST"),
        ("[localhost]:50051", "not an IPv6 address"),
    ],
)
@pytest.mark.parametrize("kind", [Client, SyncClient])
def test_invalid_addresses_are_rejected(
    kind: type[Client] | type[SyncClient], address: str, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^address: .*{message}"):
        kind(address)


def test_a_client_is_shown_with_its_addresses() -> None:
    assert repr(SyncClient("a,b:1", pool=PoolConfig(num_channels=2))) == "SyncClient('a:50051,b:1')"
    assert repr(SyncOperationsClient("a")) == "SyncOperationsClient('a:50052')"


@pytest.fixture
def fake_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Replace OpenTelemetry's W3C propagator by one that injects the headers of the yielded dict,
    which is empty at first.
    """
    current: dict[str, str] = {}

    class TraceContextTextMapPropagator:
        def inject(self, headers: dict[str, str]) -> None:
            headers.update(current)

    module = types.ModuleType("opentelemetry.trace.propagation.tracecontext")
    module.__dict__["TraceContextTextMapPropagator"] = TraceContextTextMapPropagator
    for name in ("opentelemetry", "opentelemetry.trace", "opentelemetry.trace.propagation"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    trace_context._injector.cache_clear()
    yield current
    trace_context._injector.cache_clear()


def metadata(
    own: tuple[tuple[str, str], ...] = (), trace: TraceContext | None = None
) -> dict[str, str]:
    return dict(CallSettings(retry=NO_RETRY).call_metadata(own, trace))


def test_current_span_is_passed_on(fake_opentelemetry: dict[str, str]) -> None:
    fake_opentelemetry.update(traceparent=PARENT, tracestate="a=b", baggage="not ours")

    assert metadata() == {"traceparent": PARENT, "tracestate": "a=b"}


def test_no_span_no_headers(fake_opentelemetry: dict[str, str]) -> None:
    assert metadata() == {}


def test_explicit_trace_wins(fake_opentelemetry: dict[str, str]) -> None:
    fake_opentelemetry.update(traceparent="00-current")

    assert metadata(trace=TraceContext(traceparent=PARENT)) == {"traceparent": PARENT}
    assert metadata((("traceparent", PARENT),)) == {"traceparent": PARENT}


def test_works_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace.propagation.tracecontext", None)
    trace_context._injector.cache_clear()
    try:
        assert metadata((("a", "b"),)) == {"a": "b"}
    finally:
        trace_context._injector.cache_clear()


def test_client_metadata_goes_with_every_call() -> None:
    settings = CallSettings(retry=NO_RETRY, metadata=(("authorization", "Bearer t"),))

    pairs = settings.call_metadata((("x", "y"),), TraceContext(traceparent=PARENT))

    assert pairs == (("authorization", "Bearer t"), ("x", "y"), ("traceparent", PARENT))


def test_channel_options_limit_keepalive_pings() -> None:
    options: dict[str, Any] = dict(ChannelConfig().options())

    assert options["grpc.keepalive_time_ms"] >= 20_000
    assert options["grpc.keepalive_permit_without_calls"] == 0
    assert options["grpc.max_receive_message_length"] == 32 << 20


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keepalive_s", 19.9),
        ("keepalive_timeout_s", 0.0),
        ("max_message_bytes", 0),
        ("max_reconnect_backoff_s", -1.0),
    ],
)
def test_bad_channel_settings_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}:"):
        ChannelConfig(**{field: value})
