"""Opens the sockets of a service: the TCP port that all fronts (gRPC server processes) share, and
the Unix sockets in a temporary folder.

Checks and reserves the port: a bound SO_REUSEPORT socket that never listens keeps other programs
off the port while fronts restart, and receives no connections. A killed service cannot remove its
folder, so the next service removes it. A folder is considered stale if its owner, name and age
match and no process listens on its socket.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_PREFIX: Final = "penstock-"
SOCKET_NAME: Final = "engine.sock"
MIN_AGE_S: Final = 60.0
"""Minimum age of a stale folder. A younger one may belong to a service that is about to listen."""
_FOLDER: Final = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}")
_MAX_REMOVED: Final = 1000


def create_folder(stack: contextlib.ExitStack) -> Path:
    """Create and return a folder for sockets; `stack` removes it later. Also removes the folders of
    dead services."""
    remove_leftovers(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # Its mode is 0700.
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def remove_leftovers(parent: Path) -> int:
    """Remove the folders of dead services in `parent`, and return their number. Never raises."""
    num_removed = 0
    try:
        folders = sorted(found for found in parent.iterdir() if _FOLDER.fullmatch(found.name))
    except OSError as error:
        logger.debug("cannot search %s for folders of killed services: %s", parent, error)
        return 0
    for folder in folders[:_MAX_REMOVED]:
        if _is_dead(folder):
            shutil.rmtree(folder, ignore_errors=True)
            num_removed += 1
    if num_removed:
        logger.info("removed the folders of %d services that were killed", num_removed)
    return num_removed


def _is_dead(folder: Path) -> bool:
    """Return True if this is the folder of an ended service of this user."""
    try:
        found = folder.lstat()
        path = folder / SOCKET_NAME
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not is_ours or time.time() - found.st_mtime < MIN_AGE_S:
            return False
        return stat.S_ISSOCK(path.lstat().st_mode) and not _is_listened_to(path)
    except OSError:
        return False


def _is_listened_to(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        # After any error except ECONNREFUSED, such as a full queue, it may be alive.
        return caller.connect_ex(str(path)) != errno.ECONNREFUSED


class PortUnavailable(Exception):
    """Listening on the address failed. The message has the reason."""


def listen(stack: contextlib.ExitStack, path: Path, backlog: int) -> socket.socket:
    """Return a listening Unix socket at `path`; `stack` closes it later. Raises PortUnavailable if
    `path` cannot be bound."""
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    try:
        listener.bind(str(path))
    except OSError as error:
        raise PortUnavailable(
            f"cannot listen on {path}: {error} (TMPDIR chooses another folder)"
        ) from error
    listener.listen(backlog)
    return listener


def reserve_port(host: str, port: int, *, flag: str, host_flag: str) -> socket.socket:
    """Return a bound socket that does not listen; its `getsockname()[1]` is the port (a free one if
    `port` is 0).

    Raises PortUnavailable. The message names `flag` if the port is in use or not permitted, and
    `host_flag` if `host` cannot be resolved or is not a local address.
    """
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except OSError as error:
        raise PortUnavailable(f"{host_flag}: {host!r} has no address: {error}") from error
    family, _, _, _, address = found[0]
    try:
        if port:
            _check_free(family, address)
        return _bind(family, address, socket.SO_REUSEPORT)
    except OSError as error:
        hint = "; 0 takes a free port" if error.errno == errno.EADDRINUSE else ""
        named = host_flag if error.errno == errno.EADDRNOTAVAIL else flag
        raise PortUnavailable(
            f"{named}: cannot listen on {host}:{port}: {error.strerror}{hint}"
        ) from error


def _check_free(family: int, address: tuple[str | int, ...] | tuple[int, bytes]) -> None:
    # With SO_REUSEPORT alone, a second service would silently share the port with the first one.
    # SO_REUSEADDR ignores closed connections, which still occupy the port.
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
