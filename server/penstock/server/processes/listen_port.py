"""The TCP port that all fronts share.

Checks that it is free and reserves it: a socket that is bound with SO_REUSEPORT and never listens
keeps other programs off the port while fronts restart, and receives no connection.
"""

import contextlib
import socket


class PortUnavailable(Exception):
    """The address cannot be listened on; the message gives the reason."""


def reserve_port(host: str, port: int) -> socket.socket:
    """A bound socket; its `getsockname()[1]` is the port (a free one when `port` is 0).

    Raises PortUnavailable when the port is in use, not permitted, or `host` is no local address.
    """
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except OSError as error:
        raise PortUnavailable(f"host {host!r} has no address: {error}") from error
    family, _, _, _, address = found[0]
    try:
        if port:
            _check_free(family, address)
        return _bind(family, address, socket.SO_REUSEPORT)
    except OSError as error:
        raise PortUnavailable(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _check_free(family: int, address: tuple[str | int, ...] | tuple[int, bytes]) -> None:
    # With SO_REUSEPORT alone a second service would silently share the port with the first.
    # SO_REUSEADDR still ignores the remains of closed connections.
    with contextlib.closing(_bind(family, address, socket.SO_REUSEADDR)) as probe:
        probe.listen(1)


def _bind(
    family: int, address: tuple[str | int, ...] | tuple[int, bytes], option: int
) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
