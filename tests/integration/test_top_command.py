"""Runs `penstock top` as a process: it prints one frame without a terminal, and shows a live view
on one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from penstock.client import ModelState, OperationsClient
from support.cli_process import PROGRAM, environment, run
from support.observation import model_of, observed, until_stats
from support.operations_server import FakeOperations, ServedOperations, serving_operations
from support.ports import reusable_port
from support.service import Service, Stream, simulated
from support.snapshots import request_view, waiting_view
from support.timeout import TEST_TIMEOUT_S


async def top(*args: str, **extra: str) -> tuple[int, str, str]:
    done = await run("top", *args, **extra)
    return done.code, done.out, done.err


@pytest.fixture
async def served() -> AsyncIterator[ServedOperations]:
    fake = FakeOperations()
    fake.requests = (request_view(1, num_blocks=3), waiting_view(2), request_view(3, num_blocks=9))
    async with serving_operations(fake) as served:
        yield served


async def test_one_frame_without_a_terminal(served: ServedOperations) -> None:
    code, out, err = await top("--once", "--sort", "blocks", PENSTOCK_OPERATIONS=served.address)

    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert f"penstock {served.address} tiny READY" in out
    assert out.index("request-3") < out.index("request-1")
    assert "q quit" not in out


async def test_one_snapshot_as_json(served: ServedOperations) -> None:
    code, out, _ = await top("--once", "--json", "--service", served.address)
    reported = json.loads(out)

    assert code == 0
    assert reported["stats"]["models"][0]["state"] == "READY"
    assert reported["stats"]["models"][0]["itl"]["p99_s"] == 0.03
    assert [request["request_id"][-1] for request in reported["requests"]] == ["1", "2", "3"]
    assert reported["requests"][1]["wait_reason"] == "BLOCKS"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 2, "stdout is not a terminal"),
        (("--once", "--address", "127.0.0.1:1"), 3, "UNAVAILABLE"),
    ],
)
async def test_an_error_is_printed_without_a_traceback(
    args: tuple[str, ...], code: int, message: str
) -> None:
    found, out, err = await top(*args)

    assert (found, out) == (code, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("models", "wrong port, or an older service, at {address}: operations calls (`penstock"),
        ("health", "no service penstock.v1.GenerationService at {address}: is it the operations"),
    ],
)
async def test_the_operations_port_is_not_taken_for_the_main_port(
    served: ServedOperations, command: str, line: str
) -> None:
    done = await run(command, PENSTOCK_ADDRESS=served.address)

    assert (done.code, done.out) == (1, "")
    assert line.format(address=served.address) in done.err


@pytest.fixture
def path_without_rich(tmp_path: Path) -> str:
    """Return a module path on which rich cannot be imported."""
    blocker = "import sys\nsys.modules['rich'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(blocker, encoding="utf-8")
    return os.pathsep.join((str(tmp_path), *sys.path))


async def test_a_missing_package_is_reported(
    served: ServedOperations, path_without_rich: str
) -> None:
    path = path_without_rich
    code, _, err = await top("--once", "--address", served.address, PYTHONPATH=path)
    assert (code, "(rich is not installed)" in err) == (2, True)
    code, _, _ = await top("--once", "--json", "--address", served.address, PYTHONPATH=path)
    assert code == 0


@dataclass
class Screen:
    """A command on a pseudo-terminal: its output, and keys typed by the test."""

    process: asyncio.subprocess.Process
    master: int
    text: str = ""
    more: asyncio.Event = field(default_factory=asyncio.Event)

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    async def until(self, part: str) -> None:
        """Wait until `part` appears in output that arrives from now on."""
        begin = len(self.text)
        async with asyncio.timeout(TEST_TIMEOUT_S):
            while part not in self.text[begin:]:
                self.more.clear()
                await self.more.wait()

    def read(self) -> None:
        with contextlib.suppress(OSError):  # the other side has ended
            self.text += os.read(self.master, 65536).decode("utf-8", "replace")
        self.more.set()


@contextlib.asynccontextmanager
async def on_a_terminal(*args: str) -> AsyncGenerator[Screen]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        "top",
        *args,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(TERM="xterm", COLUMNS="110", LINES="30"),
        start_new_session=True,
    )
    os.close(slave)
    screen = Screen(process, master)
    loop = asyncio.get_running_loop()
    loop.add_reader(master, screen.read)
    try:
        yield screen
    finally:
        loop.remove_reader(master)
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(master)


async def test_a_live_view_is_sorted_and_quit_by_keys(served: ServedOperations) -> None:
    args = ("--address", served.address, "--interval", "0.1")
    async with on_a_terminal(*args) as screen:
        await screen.until("requests by age")
        screen.type("s")
        await screen.until("requests by tokens")
        screen.type("q")
        assert await asyncio.wait_for(screen.process.wait(), TEST_TIMEOUT_S) == 0


async def test_a_live_view_survives_the_services_restart() -> None:
    fake, port = FakeOperations(), reusable_port()
    fake.requests = (request_view(1),)
    address = f"127.0.0.1:{port}"
    async with on_a_terminal("--address", address, "--interval", "0.1") as screen:
        async with serving_operations(fake, port):
            await screen.until("request-1")
        await screen.until("no response since")
        fake.requests = (request_view(77),)
        async with serving_operations(fake, port):
            await screen.until("request-77")
            screen.process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(screen.process.wait(), TEST_TIMEOUT_S) == 0


async def long_queue_is_shown(service: Service, operations: OperationsClient, address: str) -> None:
    """Fill the queue. Check that `penstock top` shows the predicted queue time before any request
    that waited has ended.
    """
    async with service.channel() as channel:
        assert await Stream(channel, 60).outcome() is grpc.StatusCode.OK
        # 45 s of work, so that the queue lasts until the command has started.
        queue = [Stream(channel, 150, first_token) for first_token in range(5, 35)]
        for each in queue:
            await each.until_accepted()
        await until_stats(
            operations,
            lambda stats: (
                model_of(stats).num_pending > 1 and (model_of(stats).estimated_queue_s or 0.0) > 0.0
            ),
        )
        code, out, _ = await top("--once", "--address", address)
        assert code == 0
        assert re.search(r"waiting \d+ for slots \(~\d", out)
        assert "~0 µs" not in out
    # The channel is closed, and no request is left.
    await until_stats(
        operations,
        lambda stats: (model_of(stats).num_processing, model_of(stats).num_pending) == (0, 0),
    )


async def test_a_real_service_with_a_queue_and_through_the_death_of_its_engine() -> None:
    arguments = [*simulated(), "--fronts", "1", "--max-num-seqs", "1", "--max-seq-len", "8192"]
    async with observed(*arguments) as (service, operations), service.channel() as channel:
        address = await service.printed_address("operations")
        engine_pid = await service.next_pid("engine")
        await long_queue_is_shown(service, operations, address)
        # 40 s of work each, so that both last until the command has started.
        running = Stream(channel, 4000)
        await running.until_running()
        waiting = Stream(channel, 4000, 9)
        await until_stats(
            operations,
            lambda stats: (model_of(stats).num_processing, model_of(stats).num_pending) == (1, 1),
        )

        code, out, _ = await top("--once", "--json", "--address", address)
        reported = json.loads(out)
        phases = {request["phase"]: request for request in reported["requests"]}
        assert code == 0
        assert set(phases) == {"DECODE", "QUEUE"}
        assert phases["QUEUE"]["wait_reason"] == "SLOTS"
        assert phases["QUEUE"]["queue_position"] == 0
        assert phases["DECODE"]["num_blocks"] > 0
        (model,) = reported["stats"]["models"]
        assert (model["num_processing"], model["num_pending"]) == (1, 1)

        os.kill(engine_pid, signal.SIGKILL)
        await until_stats(
            operations,
            lambda stats: (
                model_of(stats).num_engine_restarts == 1
                and model_of(stats).state is ModelState.READY
            ),
        )
        del running, waiting
        code, out, _ = await top("--once", "--address", address)
        assert code == 0
        assert "engine 2 (1 restarts)" in out
