"""The listening port of a gRPC server: plain text, or TLS with replaceable certificates."""

from typing import Any, cast

import grpc
import grpc.aio

from penstock.server.security.tls_files import TlsFiles, TlsMaterial


def add_port(server: grpc.aio.Server, address: str, tls: TlsFiles | None) -> int:
    """Listen on `address`; returns the bound port. Raises RuntimeError, as gRPC does, when it
    cannot.
    """
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _credentials(tls))


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that check at every handshake for newer files.

    No file is read then, which would block all calls: `tls` is polled elsewhere.
    """
    used = tls.material

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        material = tls.material
        if material is used:
            return None
        used = material
        return _configuration(material)

    # That None means no change is documented, but missing in the stubs.
    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        cast(Any, newer),
        require_client_authentication=tls.wants_client_certificates,
    )


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.private_key, material.cert_chain)], root_certificates=material.client_ca
    )
