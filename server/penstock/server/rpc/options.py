"""Defines the options of the gRPC server, each with its reason.

Most of them limit the transport. gRPC silently ignores unknown names of options, so the tests look
up each name in the gRPC core, and check the effect of an option where that is quick. Some values
equal the core's defaults; they are set so that a new release changes nothing.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, cast

import grpc
import grpc.aio

from penstock.server.front.config import FrontConfig, TransportConfig
from penstock.server.security.tls_files import TlsFiles, TlsMaterial

ServerOptions = tuple[tuple[str, int], ...]

MAX_MESSAGE_BYTES: Final = 4 << 20
MAX_METADATA_BYTES: Final = 8 << 10
MAX_ANY_METADATA_BYTES: Final = 2 * MAX_METADATA_BYTES
"""A call with more bytes of metadata is always rejected."""
_UNREAD_BYTES: Final = 64 << 10
MAX_CONCURRENT_STREAMS: Final = 1024
"""Maximum number of open calls per connection. The core rejects further calls with UNAVAILABLE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepaliveConfig:
    """Keepalive and maximum age of connections, in seconds. GetModel publishes them."""

    min_client_ping_interval_s: float = 10.0
    server_ping_interval_s: float = 20.0
    server_ping_timeout_s: float = 10.0
    max_connection_age_s: float = TransportConfig().max_connection_age_s
    max_connection_age_grace_s: float = 3600.0


def keepalive_of(front: FrontConfig) -> KeepaliveConfig:
    """Return the keepalive times from the settings.

    Calls on a connection that has reached its maximum age may continue at least for the longest
    deadline, so that no request is interrupted.
    """
    usual = KeepaliveConfig()
    return replace(
        usual,
        max_connection_age_s=front.transport.max_connection_age_s,
        max_connection_age_grace_s=max(usual.max_connection_age_grace_s, front.max_deadline_s),
    )


def server_options(
    keepalive: KeepaliveConfig, transport: TransportConfig | None = None
) -> ServerOptions:
    """Return options for `grpc.aio.server`. If `transport` is None, the defaults of TransportConfig
    apply."""
    transport = transport or TransportConfig()
    ping_timeout_ms = _ms(keepalive.server_ping_timeout_s)
    return (
        # Without this, a burst of resets on one connection cancels the calls of other clients.
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),  # the core's default
        # A stream that is not read may fill its window, and reading is bounded elsewhere
        # (`reading_slots.py`). The core's own estimate makes the window as large as possible.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
        # Between soft and hard limit the core rejects calls at random, so both are set, to its
        # defaults.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", _ms(keepalive.server_ping_interval_s)),
        ("grpc.keepalive_timeout_ms", ping_timeout_ms),
        # Without this, an idle stream of a client that has vanished is not detected.
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            _ms(keepalive.min_client_ping_interval_s),
        ),
        # max_connection_age_grace_ms exceeds the longest generation; longer calls are ended.
        ("grpc.max_connection_age_ms", _ms(keepalive.max_connection_age_s)),
        ("grpc.max_connection_age_grace_ms", _ms(keepalive.max_connection_age_grace_s)),
        # This limits the memory and descriptors of connections. Connections without calls end by
        # their age. grpc.max_connection_idle_ms would end them sooner, but without a warning, so
        # that a call that is being sent would be lost.
        ("grpc.max_allowed_incoming_connections", transport.max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(transport.handshake_timeout_s)),
        # Most settings do not bind a client until it has acknowledged them.
        ("grpc.http2.settings_timeout", _ms(transport.handshake_timeout_s)),
        # By default half of 5,000 calls that arrive at the same time are dropped.
        ("grpc.server.max_pending_requests", 20_000),
        # Between the two limits the core rejects connections at random; equal limits avoid that.
        ("grpc.server.max_pending_requests_hard_limit", 20_000),
        # Fronts (gRPC server processes) share the port, and the supervisor reserves it. This is the
        # core's default where the system supports it.
        ("grpc.so_reuseport", 1),
    )


def _ms(duration_s: float) -> int:
    return round(duration_s * 1000)


def add_port(server: grpc.aio.Server, address: str, tls: TlsFiles | None) -> int:
    """Listen on `address` and return the bound port. Raises RuntimeError, as gRPC does, if that
    fails."""
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _credentials(tls))


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials that use the latest `tls.material` at each handshake.

    A handshake does not read files, because that would block all calls. Other code polls `tls` to
    read changed files.
    """
    used = tls.material

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        material = tls.material
        if material is used:
            return None
        used = material
        return _configuration(material)

    # None means no change, which is documented but missing in the type stubs.
    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        cast(Any, newer),
        require_client_authentication=tls.wants_client_certificates,
    )


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.private_key, material.cert_chain)], root_certificates=material.client_ca
    )
