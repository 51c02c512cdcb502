"""The temporary folder of a service's sockets: created here, and removed after a killed service.

A killed service cannot remove its folder. A folder counts as stale when its owner, name and age fit
and nothing listens on its socket.
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

log = logging.getLogger(__name__)

_PREFIX: Final = "penstock-"
SOCKET_NAME: Final = "engine.sock"
MIN_AGE_S: Final = 60.0
"""A younger folder may belong to a service that is about to listen."""
_FOLDER: Final = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}")
_MAX_REMOVED: Final = 1000


def create_folder(stack: contextlib.ExitStack) -> Path:
    """Create a folder that `stack` removes; removes those of dead services first."""
    remove_leftovers(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def remove_leftovers(parent: Path) -> int:
    """Remove the folders of dead services in `parent`; returns how many. Never raises."""
    num_removed = 0
    try:
        folders = sorted(found for found in parent.iterdir() if _FOLDER.fullmatch(found.name))
    except OSError as error:
        log.debug("cannot search %s for folders of killed services: %s", parent, error)
        return 0
    for folder in folders[:_MAX_REMOVED]:
        if _is_dead(folder):
            shutil.rmtree(folder, ignore_errors=True)
            num_removed += 1
    if num_removed:
        log.info("removed the folders of %d services that were killed", num_removed)
    return num_removed


def _is_dead(folder: Path) -> bool:
    """Whether it is the folder of a service of this user that has ended."""
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
        # Any error other than a refused connection, a full queue included, may mean that it is
        # alive.
        return caller.connect_ex(str(path)) != errno.ECONNREFUSED
