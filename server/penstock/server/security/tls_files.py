"""Loads the certificate, the key and the client CA (certificate authority) of a service, and
reloads them when their files change.

Only files that match each other are used. Owns the TLS context of the metrics port, because this
port uses Python's TLS. It requires no client certificates, because health probes have none and
scrapers authenticate by a token.
"""

import logging
import socket
import ssl
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from penstock.server.security.config import SecurityConfig
from penstock.server.security.watched_file import FilesChanged, Stamp, read_together, stamp_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TlsMaterial:
    """Certificate, key and client CA as PEM bytes. `client_ca` is None if client certificates are
    not used."""

    cert_chain: bytes
    private_key: bytes
    client_ca: bytes | None


class TlsFiles:
    """The certificate, key and client CA named in a configuration. The configuration must have TLS.
    The constructor raises ValueError or OSError if the files are invalid."""

    def __init__(self, config: SecurityConfig) -> None:
        assert config.tls_cert is not None
        assert config.tls_key is not None
        self._cert, self._key, self._client_ca = (
            config.tls_cert,
            config.tls_key,
            config.tls_client_ca,
        )
        self.material, self._stamp = self._load()

    @property
    def wants_client_certificates(self) -> bool:
        """True if clients must present a certificate (mutual TLS)."""
        return self._client_ca is not None

    def poll(self) -> bool:
        """Check whether files have changed; return True if `material` is different now.

        Files that do not match each other, e.g. because only one is written yet, are logged once
        and not used.
        """
        stamp = stamp_of(self._paths)
        if stamp == self._stamp:
            return False
        try:
            material, self._stamp = self._load()
        except FilesChanged:
            return False
        except (ValueError, OSError) as error:
            self._stamp = stamp
            logger.error("the old certificate stays in use: %s", error)  # noqa: TRY400 (in one line)
            return False
        is_other = material != self.material
        self.material = material
        if is_other:
            logger.info("new connections use new certificates")
        return is_other

    @property
    def _paths(self) -> tuple[Path, ...]:
        files = (self._cert, self._key)
        return files if self._client_ca is None else (*files, self._client_ca)

    def _load(self) -> tuple[TlsMaterial, Stamp]:
        contents, stamp = read_together(self._paths)
        self._check()
        # OpenSSL opens the files itself, so the bytes that were checked must be those that were
        # read.
        if stamp_of(self._paths) != stamp:
            raise FilesChanged(self._paths)
        client_ca = contents[2] if self._client_ca is not None else None
        material = TlsMaterial(cert_chain=contents[0], private_key=contents[1], client_ca=client_ca)
        return material, stamp

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # OpenSSL would ask for a password on the terminal.
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except ssl.SSLError as error:
            raise ValueError(f"{self._cert} and {self._key}: {_reason(error)}") from None
        except _NeedsPassword:
            raise ValueError(f"{self._key} is encrypted: an unencrypted key is needed") from None
        if self._client_ca is None:
            return
        try:
            context.load_verify_locations(self._client_ca)
        except ssl.SSLError as error:
            raise ValueError(f"{self._client_ca}: {_reason(error)}") from None
        if not context.cert_store_stats()["x509_ca"]:
            raise ValueError(f"{self._client_ca}: contains no certificate of an authority")


class _NeedsPassword(Exception):
    pass


def _no_password() -> str:
    raise _NeedsPassword


def _reason(error: ssl.SSLError) -> str:
    if not error.reason:
        return "no valid certificate and key in PEM form"
    return error.reason.lower().replace("_", " ")


class HttpsContext:
    """Wraps accepted sockets with server-side TLS, using the current files of `tls`. The caller
    must poll `tls`."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._used = tls.material
        self._context = _context(self._used)

    def wrap(self, accepted: socket.socket) -> ssl.SSLSocket:
        """Return a TLS socket over the accepted socket. Its first read does the handshake."""
        with self._lock:
            material = self._tls.material
            if material is not self._used:
                self._context, self._used = _context(material), material
        return self._context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)


def _context(material: TlsMaterial) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # OpenSSL reads a chain only from a path. The file must contain the checked bytes, because the
    # configured files may have changed. The folder is private to this user, and removed
    # immediately.
    with tempfile.TemporaryDirectory(prefix="penstock-tls-") as folder:
        path = Path(folder) / "chain-and-key.pem"
        path.touch(mode=0o600)
        path.write_bytes(material.private_key.rstrip() + b"\n" + material.cert_chain)
        context.load_cert_chain(path)
    return context
