"""What services that were killed have left among the temporary files, and its removal.

A service that is killed cannot clear away the folder of its sockets. Owns the rule by which one of
those is known to be dead: it is ours by user, name and age, and nobody listens on its socket.
"""

import errno
import logging
import os
import re
import shutil
import socket
import stat
import time
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

FOLDER_PREFIX: Final = "penstock-"
SOCKET_NAME: Final = "engine.sock"
MIN_AGE_S: Final = 60.0
"""A younger one may belong to a service that is about to listen."""
_FOLDER: Final = re.compile(re.escape(FOLDER_PREFIX) + r"[a-z0-9_]{8}")
_MAX_REMOVED: Final = 1000


def remove_leftovers(parent: Path) -> int:
    """Remove the folders of dead services in `parent`; how many. Raises nothing: it is a favour."""
    num_removed = 0
    try:
        folders = sorted(found for found in parent.iterdir() if _FOLDER.fullmatch(found.name))
    except OSError as error:
        log.debug("cannot look for leftovers in %s: %s", parent, error)
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
        # Anything but a plain refusal, a full queue among them, may be a service that lives.
        return caller.connect_ex(str(path)) != errno.ECONNREFUSED
