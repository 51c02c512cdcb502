"""The files of flight records: their permissions, how many are kept, and that none is
incomplete.
"""

import os
import stat
import tempfile
import time
from pathlib import Path

import pytest

from penstock.server.observe.flight import reader
from penstock.server.observe.flight.layout import FlightError
from penstock.server.observe.flight.memory import create_memory
from penstock.server.observe.flight.reader import (
    MAX_NUM_ALL_FILES,
    MAX_NUM_FILES,
    FlightReader,
    default_folder,
    dump,
    make_default_folder,
)
from support.flights import RecordedEngine, play


@pytest.fixture(scope="module")
def memory() -> int:
    recorded = play(RecordedEngine(num_steps=64), 2, 10)
    return recorded.fd


def test_a_dump_is_readable_by_its_owner_only_and_states_its_reason(
    memory: int, tmp_path: Path
) -> None:
    folder = tmp_path / "a" / "flights"

    path = dump(memory, folder, "Engine died: SIGKILL!")

    assert path.parent == folder
    assert path.name.startswith("penstock-flight-20")
    assert path.name.endswith("Z-engine-died-sigkill.bin")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == [path]
    assert len(FlightReader(path).recording().steps) > 0
    assert dump(memory, folder, "../../x y").name.endswith("-x-y.bin")
    assert dump(memory, folder, "").name.endswith("-requested.bin")


def test_the_newest_are_kept_and_other_files_too(memory: int, tmp_path: Path) -> None:
    (tmp_path / "mine.bin").write_text("x")
    paths = [dump(memory, tmp_path, "requested") for _ in range(MAX_NUM_FILES + 3)]

    kept = sorted(tmp_path.glob("penstock-flight-*"))

    assert kept == paths[3:]
    assert (tmp_path / "mine.bin").exists()


def test_many_dumps_on_request_replace_no_other_dumps(memory: int, tmp_path: Path) -> None:
    died = dump(memory, tmp_path, "engine died", port=50051)
    neighbours = dump(memory, tmp_path, "operator", port=50052)
    asked = [dump(memory, tmp_path, "operator", port=50051) for _ in range(MAX_NUM_FILES + 3)]
    assert died.name.endswith("Z-50051-engine-died.bin")
    assert set(tmp_path.iterdir()) == {died, neighbours, *asked[3:]}


def test_the_total_number_of_dumps_is_bounded(memory: int, tmp_path: Path) -> None:
    paths = [
        dump(memory, tmp_path, "operator", port=port)
        for port in range(50000, 50000 + MAX_NUM_ALL_FILES + 2)
    ]
    assert set(tmp_path.iterdir()) == set(paths[2:])


def test_files_of_a_killed_writer_are_removed(memory: int, tmp_path: Path) -> None:
    left, fresh = (tmp_path / f".penstock-flight-{name}-x.bin.part" for name in ("old", "new"))
    mine = tmp_path / ".mine.part"
    for path in (left, fresh, mine):
        path.write_bytes(b"x")
    long_ago_s = time.time() - 90.0
    for path in (left, mine):
        os.utime(path, (long_ago_s, long_ago_s))
    path = dump(memory, tmp_path, "requested")
    assert set(tmp_path.iterdir()) == {path, fresh, mine}


def test_a_full_disk_leaves_no_file(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        dump(memory, tmp_path, "crash")
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_must_belong_to_the_user(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    path = dump(memory, None, "crash")
    assert path.parent == default_folder()
    assert str(os.geteuid()) in path.parent.name
    path.parent.chmod(0o755)
    assert stat.S_IMODE(make_default_folder().stat().st_mode) == 0o700

    path.unlink()
    path.parent.rmdir()
    (tmp_path / "elsewhere").mkdir()
    default_folder().symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a folder of this user"):
        dump(memory, None, "crash")
    default_folder().unlink()
    default_folder().mkdir()
    euid = os.geteuid()
    own = default_folder()
    monkeypatch.setattr(reader, "default_folder", lambda: own)
    monkeypatch.setattr(os, "geteuid", lambda: euid + 1)
    with pytest.raises(PermissionError, match="not a folder of this user"):
        dump(memory, None, "crash")


def test_an_empty_flight_recorder_writes_no_file(tmp_path: Path) -> None:
    with pytest.raises(FlightError, match="no engine"):
        dump(create_memory(64, "t"), tmp_path, "crash")
    assert list(tmp_path.iterdir()) == []
