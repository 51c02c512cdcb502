"""TLS for the metrics port: the certificate of the other ports, over Python's own TLS.

Owns the context, and that a newer certificate gets into it. Clients need no certificate there: a
probe has none, and scrapers have a token.
"""

import socket
import ssl
import tempfile
import threading
from pathlib import Path

from penstock.server.security.tls_files import TlsFiles, TlsMaterial


class HttpsContext:
    """Wraps accepted sockets. `tls` is polled elsewhere; what it has then is used from then on."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._used = tls.material
        self._context = _context(self._used)

    def wrap(self, accepted: socket.socket) -> ssl.SSLSocket:
        """The socket with TLS on it, its handshake still to be made, by whoever reads first."""
        with self._lock:
            material = self._tls.material
            if material is not self._used:
                self._context, self._used = _context(material), material
        return self._context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)


def _context(material: TlsMaterial) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # OpenSSL reads a chain from a path alone, and this must be what was checked, not what the
    # files hold by now. The folder is this user's own, and gone at once.
    with tempfile.TemporaryDirectory(prefix="penstock-tls-") as folder:
        path = Path(folder) / "chain-and-key.pem"
        path.touch(mode=0o600)
        path.write_bytes(material.private_key.rstrip() + b"\n" + material.cert_chain)
        context.load_cert_chain(path)
    return context
