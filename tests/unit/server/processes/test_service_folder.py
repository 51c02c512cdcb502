"""Folders of services that have ended are removed, and no others."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.server.processes.service_sockets import MIN_AGE_S, SOCKET_NAME, remove_leftovers


@pytest.fixture
def parent() -> Iterator[Path]:
    # Short: the path of a socket has 108 bytes.
    with tempfile.TemporaryDirectory(prefix="pen") as folder:
        yield Path(folder)


def folder_of(parent: Path, name: str, *, age_s: float = 2 * MIN_AGE_S) -> Path:
    """Create and return a service's folder of this age. It contains a socket on which nothing
    listens.
    """
    folder = parent / name
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / SOCKET_NAME))
    made_s = folder.stat().st_mtime - age_s
    os.utime(folder, (made_s, made_s))
    return folder


def test_the_folder_of_a_dead_service_is_removed(parent: Path) -> None:
    dead = folder_of(parent, "penstock-abcd_123")
    assert remove_leftovers(parent) == 1
    assert not dead.exists()


@pytest.mark.parametrize("name", ["penstock-flight-0", "penstock-short", "other-abcd1234"])
def test_folders_of_other_names_are_kept(parent: Path, name: str) -> None:
    folder_of(parent, name)
    assert remove_leftovers(parent) == 0


def test_a_folder_of_a_starting_service_is_kept(parent: Path) -> None:
    folder_of(parent, "penstock-abcd_123", age_s=0.0)
    assert remove_leftovers(parent) == 0


def test_folders_without_a_socket_and_links_are_kept(parent: Path) -> None:
    real = folder_of(parent, "elsewhere")
    (parent / "penstock-abcd_123").symlink_to(real)
    empty = parent / "penstock-abcd_124"
    empty.mkdir()
    os.utime(empty, (0, 0))
    assert remove_leftovers(parent) == 0


def test_the_folder_of_a_live_service_is_kept_even_if_it_is_busy(parent: Path) -> None:
    folder = folder_of(parent, "penstock-abcd_123")
    (folder / SOCKET_NAME).unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / SOCKET_NAME))
        listener.listen(0)
        os.utime(folder, (0, 0))
        for _ in range(3):  # its queue is full after the first
            assert remove_leftovers(parent) == 0
    os.utime(folder, (0, 0))
    assert remove_leftovers(parent) == 1


def test_a_missing_parent_is_no_error(parent: Path) -> None:
    assert remove_leftovers(parent / "missing") == 0
