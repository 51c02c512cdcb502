"""Checks the output paths of a command before its work starts, so that no result is lost.

Does not create or write files.
"""

import os
from importlib.util import find_spec
from pathlib import Path

from penstock.conventions.extras import requires_extra
from penstock.server.cli.connection import UsageError


def check_output_file(option: str, path: Path | None) -> None:
    """Raise UsageError if the file at `path`, given by the flag `option`, cannot be written. Do
    nothing if `path` is None.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option}: folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{option}: {path} cannot be written: permission denied")


def check_output_folder(option: str, folder: Path | None) -> None:
    """Raise UsageError if files cannot be written to `folder`, given by the flag `option`, or if it
    does not exist and cannot be created. Do nothing if `folder` is None.
    """
    if folder is None:
        return
    path = folder.absolute()
    existing = next(each for each in (path, *path.parents) if each.exists())
    if not existing.is_dir():
        raise UsageError(f"{option}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{option}: folder {existing} cannot be written: permission denied")


def check_report_folder(folder: Path | None, extra: str) -> None:
    """Raise UsageError if no report can be written to `folder`, given by the flag --report. Do
    nothing if `folder` is None. `extra`: the extra of the command, which installs matplotlib.
    """
    check_output_folder("--report", folder)
    if folder is not None and find_spec("matplotlib") is None:
        raise UsageError(f"--report {requires_extra(extra, 'matplotlib')}")
