"""TLS for the metrics port: the certificate of the other ports, with Python's own TLS.

Owns the context and its renewal. Client certificates are not needed there: a probe has none, and
scrapers have a token.
"""

import socket
import ssl
import tempfile
import threading
from pathlib import Path

from penstock.server.security.tls_files import TlsFiles, TlsMaterial


class HttpsContext:
    """Wraps accepted sockets. `tls` is polled elsewhere; its current files are used."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._used = tls.material
        self._context = _context(self._used)

    def wrap(self, accepted: socket.socket) -> ssl.SSLSocket:
        """The socket with TLS; the first read does the handshake."""
        with self._lock:
            material = self._tls.material
            if material is not self._used:
                self._context, self._used = _context(material), material
        return self._context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)


def _context(material: TlsMaterial) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # OpenSSL reads a chain only from a path, and this must be the bytes that were checked, not what
    # the files contain by now. The folder is private to this user, and removed at once.
    with tempfile.TemporaryDirectory(prefix="penstock-tls-") as folder:
        path = Path(folder) / "chain-and-key.pem"
        path.touch(mode=0o600)
        path.write_bytes(material.private_key.rstrip() + b"\n" + material.cert_chain)
        context.load_cert_chain(path)
    return context
