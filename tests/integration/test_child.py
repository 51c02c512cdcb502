"""Child processes of the supervisor that cannot be started or that send an invalid startup report.
The processes are real.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.server.ipc.control_frames import (
    FROM_CHILD,
    TO_CHILD,
    Launch,
    Ready,
    SetLogLevel,
    StartFailed,
    Stop,
)
from penstock.server.processes.child import Child, ChildFailed
from penstock.server.processes.supervised_process import SupervisedProcess
from support.timeout import TEST_TIMEOUT_S

WAIT = "line.recv(4096)"
READY = FROM_CHILD.encode(Ready(facts={"num_blocks": 7}))


async def spawn_printing(folder: Path, words: bytes, end: str = WAIT) -> Child:
    """Start a child that sends `words` on its control socket, and then runs the code `end`; by
    default it waits until the socket is closed.
    """
    code = (
        "import socket, sys\n"
        "line = socket.socket(fileno=int(sys.argv[1]))\n"
        f"assert line.recv(4096) == {TO_CHILD.encode(Launch(settings=b'settings'))!r}\n"
        f"line.sendall({words!r})\n"
        f"{end}\n"
    )
    (folder / "speaking_child.py").write_text(code, encoding="utf-8")
    return await Child.spawn(
        "speaker", "speaking_child", b"settings", environment={"PYTHONPATH": str(folder)}
    )


async def test_the_startup_report_of_a_ready_child(tmp_path: Path) -> None:
    child = await spawn_printing(tmp_path, READY)
    try:
        assert await child.started() == {"num_blocks": 7}
    finally:
        child.kill()
        await child.ended()


@pytest.mark.parametrize(
    "words",
    [
        b"no frame\n",
        FROM_CHILD.encode(SetLogLevel(level="debug")),
        READY[:-1] + b"\xc1",
        READY[:2] + b"\xff" + READY[3:],
    ],
    ids=["no frame", "another frame", "damaged", "too long"],
)
async def test_a_child_with_an_invalid_startup_report_has_failed_and_is_killed(
    tmp_path: Path, words: bytes
) -> None:
    child = await spawn_printing(tmp_path, words, end="import signal\nsignal.pause()")
    with pytest.raises(ChildFailed, match="speaker: invalid startup report"):
        await child.started()
    assert await child.ended() < 0, "killed: it had not ended by itself"


@pytest.mark.parametrize("words", [b"", READY[:-1]])
async def test_a_child_that_ends_before_its_frame_does_is_reported_by_its_exit(
    tmp_path: Path, words: bytes
) -> None:
    child = await spawn_printing(tmp_path, words, end="sys.exit(5)")
    with pytest.raises(ChildFailed, match=r"speaker: .*5.* before it was ready"):
        await child.started()
    assert await child.ended() == 5


@pytest.mark.parametrize("words", [b"", READY[:-1]])
async def test_a_childs_exit_is_detected_although_its_fork_keeps_the_socket_open(
    tmp_path: Path, words: bytes
) -> None:
    fork = f"import os\nif os.fork():\n    os._exit(5)\n{WAIT}"
    child = await spawn_printing(tmp_path, words, end=fork)
    with pytest.raises(ChildFailed, match=r"speaker: exit code 5 before it was ready"):
        await child.started()
    assert await child.ended() == 5  # hangs up, which ends the other one


async def test_a_failure_is_reported_with_the_childs_message(tmp_path: Path) -> None:
    words = FROM_CHILD.encode(StartFailed(message="no such model"))
    child = await spawn_printing(tmp_path, words, end="sys.exit(4)")
    with pytest.raises(ChildFailed, match=r"^no such model$"):
        await child.started()
    assert await child.ended() == 4


async def test_a_slot_whose_first_child_sends_an_invalid_report_fails(tmp_path: Path) -> None:
    child = await spawn_printing(tmp_path, b"no frame\n")

    async def spawn() -> Child:
        return child

    with pytest.raises(ChildFailed, match="invalid startup report"):
        await SupervisedProcess("speaker", spawn).keep_alive()
    await child.ended()


async def test_a_child_that_cannot_be_started_leaves_no_socket_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []
    make_pair = socket.socketpair

    def remember() -> tuple[socket.socket, socket.socket]:
        pair = make_pair()
        made.extend(pair)
        return pair

    monkeypatch.setattr(sys, "executable", str(tmp_path / "no such program"))
    monkeypatch.setattr(socket, "socketpair", remember)
    with pytest.raises(FileNotFoundError):
        await Child.spawn("speaker", "speaking_child", b"settings", environment={})
    assert len(made) == 2
    assert [end.fileno() for end in made] == [-1, -1]


def test_a_command_sent_with_the_settings_is_executed(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    program = (
        "import signal, sys; from pathlib import Path;"
        "from penstock.server.processes.control import ChildControl;"
        "control = ChildControl(int(sys.argv[1]));"
        "assert control.read_launch() == b'{}';"
        "control.watch_supervisor(Path(sys.argv[2]));"
        "signal.pause()"
    )
    with ours, theirs:
        # Both are sent before the child reads, as when a service stops during its start.
        ours.sendall(TO_CHILD.encode(Launch(settings=b"{}")) + TO_CHILD.encode(Stop()))
        child = subprocess.run(
            [sys.executable, "-c", program, str(theirs.fileno()), str(tmp_path / "x.sock")],
            pass_fds=[theirs.fileno()],
            timeout=TEST_TIMEOUT_S,
            check=False,
        )
    assert child.returncode == 0
