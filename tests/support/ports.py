"""Ports for programs that cannot bind port 0 (any free port), or that must bind the same port
again.

They are below the range from which the kernel chooses ports, so that no connection of another test
takes one of them meanwhile.
"""

import secrets
import socket
from pathlib import Path

_LOWEST = 20_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def reusable_port() -> int:
    """Return a port of 127.0.0.1 to which no socket is bound now."""
    end = int(_RANGE.read_text().split()[0])
    while True:
        port = _LOWEST + secrets.randbelow(end - _LOWEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
