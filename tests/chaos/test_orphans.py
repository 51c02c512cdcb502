"""Processes that an engine leaves behind are ended before the next engine starts (real
processes).
"""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import grpc
import pytest
from grpc_health.v1 import health_pb2

from penstock.server.process_table import entry_of, send_signal
from support.service import Stream, launched, simulated, started, until_gone, until_health

SERVING = health_pb2.HealthCheckResponse.SERVING

# Engines that start worker processes, or whose load fails.

_SITE = Path(__file__).parent / "engine_site"

Worker = Literal["child", "detached", "stubborn", "tree"]
Load = Literal["works", "raises", "exits", "crashes", "sticks"]


def engine_conduct(
    folder: Path, worker: Worker | None = None, load: Load = "works", sticks_from_life: int = 1
) -> dict[str, str]:
    """Return the environment for `support.service`. `folder`: an empty folder in which workers
    create files.

    `worker`: a child of the engine, a detached one, one that also ignores SIGTERM, or a detached
    one with children. Each holds a lock that the next engine's worker needs. `load`: how loading
    the model ends; with "sticks" it hangs in the engine number `sticks_from_life` and all later
    ones.
    """
    conduct = {
        "folder": str(folder),
        "worker": worker,
        "load": load,
        "sticks_from_life": sticks_from_life,
    }
    inherited = os.environ.get("PYTHONPATH")
    path = str(_SITE) if inherited is None else f"{_SITE}{os.pathsep}{inherited}"
    return {"PYTHONPATH": path, "ENGINE_CONDUCT": json.dumps(conduct)}


def workers_in(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("worker-")) for path in folder.glob("worker-*")}


def is_worker_of(pid: int, folder: Path) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return str(folder).encode() in arguments


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="adoption is Linux's")

WORKERS: list[Worker] = ["child", "detached", "stubborn", "tree"]
NUM_WORKERS = {"child": 1, "detached": 1, "stubborn": 1, "tree": 3}
LOADS: list[tuple[Load, str]] = [
    ("raises", "RuntimeError: the driver is too old"),
    ("exits", "SystemExit: the launcher was not found"),
    ("crashes", "engine: killed by signal 6 before it was ready"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Provide the folder where workers report; kill remaining workers at the end."""
    yield tmp_path
    for pid in workers_in(tmp_path):
        entry = entry_of(pid)
        if entry is not None and is_worker_of(pid, tmp_path):
            send_signal(entry, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    entry = entry_of(pid)
    return entry is not None and not entry.has_ended


@pytest.mark.parametrize("worker", WORKERS)
async def test_workers_of_a_killed_engine_are_gone_before_the_next_one_is_ready(
    folder: Path, worker: Worker
) -> None:
    environment = engine_conduct(folder, worker)
    arguments = [*simulated(), "--fronts", "2"]
    async with started(*arguments, environment=environment) as service:
        engine = await service.next_pid("engine")
        fronts = [await service.next_pid("front") for _ in range(2)]
        before = workers_in(folder)
        assert len(before) == NUM_WORKERS[worker]
        assert all(map(is_alive, before))

        os.kill(engine, signal.SIGKILL)
        assert await service.next_pid("engine") != engine
        # They are reaped too. Workers of the next engine hold the same files.
        assert [pid for pid in before if entry_of(pid) is not None] == []
        after = workers_in(folder) - before
        assert len(after) == NUM_WORKERS[worker]
        assert all(map(is_alive, after))
        assert all(map(is_alive, fronts))
        async with service.channel() as channel:
            # The front finds the new engine a moment after the supervisor knows it.
            await until_health(channel, SERVING)
            assert await Stream(channel, 5).outcome() is grpc.StatusCode.OK

        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
        assert [pid for pid in before | after if entry_of(pid) is not None] == []
        deaths = [
            line
            for line in service.stderr
            if re.search(r"supervised_process: (engine|front \d) died", line)
        ]
        assert len(deaths) == 1
        reported = {
            line.split(" left behind by the engine: ")[-1].strip()
            for line in service.stderr
            if "SIGTERM sent" in line
        }
        assert {int(re.findall(r"pid=(\d+) name=\S+$", line)[0]) for line in reported} >= before


async def test_only_what_ignores_sigterm_is_killed(folder: Path) -> None:
    environment = engine_conduct(folder, "stubborn")
    async with started(*simulated(), environment=environment) as service:
        (worker,) = workers_in(folder)
        os.kill(await service.next_pid("engine"), signal.SIGKILL)
        await service.next_pid("engine")
        reported = [
            line for line in service.stderr if f"left behind by the engine: pid={worker} " in line
        ]
        assert ["SIGTERM sent" in line for line in reported] == [True, False]
        assert "SIGKILL sent" in reported[1]
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


@pytest.mark.parametrize("worker", WORKERS)
async def test_workers_do_not_outlive_a_killed_supervisor(folder: Path, worker: Worker) -> None:
    environment = engine_conduct(folder, worker)
    arguments = [*simulated(), "--fronts", "2"]
    async with started(*arguments, environment=environment) as service:
        workers = workers_in(folder)
        assert len(workers) == NUM_WORKERS[worker]
        service.signal(signal.SIGKILL)
        for pid in workers:
            await until_gone(pid)
        assert await service.ended() == -signal.SIGKILL


@pytest.mark.parametrize(("load", "message"), LOADS)
async def test_a_failed_load_is_reported_in_one_line_and_leaves_no_worker(
    folder: Path, load: Load, message: str
) -> None:
    environment = engine_conduct(folder, "detached", load)
    async with launched(*simulated(), environment=environment) as service:
        assert await service.ended() == 2
        reported = [line for line in service.stderr if line.startswith("penstock serve: ")]
        assert reported == [f"penstock serve: {message}\n"]
        assert not [line for line in service.stderr if "Traceback" in line]
        (worker,) = workers_in(folder)
        assert entry_of(worker) is None


async def test_a_signal_ends_a_load_that_hangs_in_native_code(folder: Path) -> None:
    environment = engine_conduct(folder, "detached", "sticks")
    arguments = [*simulated(), "--drain-timeout-s", "600"]
    async with launched(*arguments, environment=environment) as service:
        await service.until_logged("the load is stuck")
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
        (worker,) = workers_in(folder)
        assert entry_of(worker) is None


async def test_a_signal_ends_a_later_load_that_hangs(folder: Path) -> None:
    environment = engine_conduct(folder, "detached", "sticks", sticks_from_life=2)
    arguments = [*simulated(), "--drain-timeout-s", "600"]
    async with started(*arguments, environment=environment) as service:
        os.kill(await service.next_pid("engine"), signal.SIGKILL)
        await service.until_logged("the load is stuck")
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
        assert not [line for line in service.stderr if "did not shut down cleanly" in line]
        workers = workers_in(folder)
        assert len(workers) == 2
        assert [pid for pid in workers if entry_of(pid) is not None] == []


# An entrypoint script starts a process, which starts another, and then executes the service.
ENTRYPOINT = """
mkfifo "$0/said"
( sleep 600 & echo "$!" >"$0/said"; wait ) </dev/null >/dev/null 2>&1 &
echo "$!" >"$0/stranger-0"
cat "$0/said" >"$0/stranger-1"
exec "$@"
"""


async def test_processes_of_others_are_not_killed(folder: Path) -> None:
    environment = engine_conduct(folder, "detached")
    through = ["sh", "-c", ENTRYPOINT, str(folder)]
    foreign_pids: list[int] = []
    try:
        async with started(*simulated(), environment=environment, through=through) as service:
            foreign_pids = [int((folder / f"stranger-{n}").read_text()) for n in range(2)]
            (worker,) = workers_in(folder)
            # The inner process is now an orphan, which the supervisor adopts; it is not an
            # engine's.
            os.kill(foreign_pids[0], signal.SIGKILL)
            os.kill(await service.next_pid("engine"), signal.SIGKILL)
            await service.next_pid("engine")
            assert entry_of(worker) is None
            adopted = entry_of(foreign_pids[1])
            assert adopted is not None
            assert not adopted.has_ended
            assert adopted.parent_pid == service.process.pid
            service.signal(signal.SIGTERM)
            assert await service.ended() == 0
        assert is_alive(foreign_pids[1])
    finally:
        for pid in foreign_pids[1:]:
            os.kill(pid, signal.SIGKILL)
