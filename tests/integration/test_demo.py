"""Runs `penstock demo` as a process: it starts a service, displays three streams, and leaves no
process behind.
"""

import asyncio
import re
import signal
from contextlib import AbstractAsyncContextManager

import psutil
import pytest

from support.cli_process import running
from support.timeout import TEST_TIMEOUT_S

NAMES = ("menenius", "romeo", "richard")


def demo(*args: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    return running("demo", "--executor", "simulated", *args)


async def streaming(process: asyncio.subprocess.Process) -> None:
    """Wait until the demo prints that a request is being processed."""
    assert process.stdout is not None
    line = b""
    while b"PROCESSING" not in line:
        line = await asyncio.wait_for(process.stdout.readline(), TEST_TIMEOUT_S)
        assert line, "the demo ended before it streamed"


async def test_three_streams_and_a_clean_end() -> None:
    async with demo("--max-tokens", "40") as process:
        out, err = await asyncio.wait_for(process.communicate(), TEST_TIMEOUT_S)

    assert err.decode() == ""
    assert process.returncode == 0
    lines = out.decode().splitlines()
    for name in NAMES:
        own = [line for line in lines if line.startswith(f"{name:<9}|")]
        states = [line.split()[3] for line in own if "| * " in line]
        assert states == ["PENDING", "PROCESSING", "COMPLETED"]
        assert any("| * " not in line for line in own)
    table = lines[lines.index("service stopped") - 5 :]
    rows = {line.split()[0]: line.split() for line in table if line.startswith(NAMES)}
    assert set(rows) == set(NAMES)
    for row in rows.values():
        assert row[-1] == "length"
        assert row[-3] == "40"


async def test_ctrl_c_stops_the_service_too() -> None:
    # More tokens than the demo can generate before it receives the signal.
    async with demo("--max-tokens", "900") as process:
        await streaming(process)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), TEST_TIMEOUT_S)

    assert process.returncode == 130
    assert b"interrupted, service stopped" in err
    assert b"Traceback" not in err
    assert len(family) >= 3  # supervisor, engine, front
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, TEST_TIMEOUT_S)
    assert alive == []


async def test_a_service_that_does_not_start_in_time_is_ended() -> None:
    async with demo("--start-timeout", "0.01") as process:
        _, err = await asyncio.wait_for(process.communicate(), TEST_TIMEOUT_S)

    assert process.returncode == 1
    assert err.decode().startswith("penstock demo: the service was not ready after 0.01 s")


async def test_a_bad_request_fails_the_demo() -> None:
    async with demo("--max-tokens", "1000000000") as process:
        out, err = await asyncio.wait_for(process.communicate(), TEST_TIMEOUT_S)

    assert process.returncode == 1
    assert "service stopped" in out.decode()
    for name in NAMES:
        assert f"penstock demo: {name}: INVALID_ARGUMENT" in err.decode()
    assert "stopping.max_tokens" in err.decode()


async def test_a_service_that_dies_fails_the_demo() -> None:
    async with demo("--max-tokens", "900") as process:
        await streaming(process)
        supervisor = psutil.Process(process.pid).children()[0]
        family = supervisor.children(recursive=True)
        supervisor.kill()
        _, err = await asyncio.wait_for(process.communicate(), TEST_TIMEOUT_S)

    assert process.returncode == 1
    # Either the wait for the process or the streams may detect it first.
    assert re.search(r"the service ended (by itself )?with exit code -9", err.decode())
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, TEST_TIMEOUT_S)
    assert alive == []


async def test_a_killed_engine_changes_no_text() -> None:
    async with demo("--kill") as process:
        out, err = await asyncio.wait_for(process.communicate(), TEST_TIMEOUT_S)

    assert err.decode() == ""
    assert process.returncode == 0
    assert re.search(r"^kill -9 \d+: engine killed", out.decode(), re.MULTILINE)
    for name in NAMES:
        assert re.search(rf"^{name} +600 .* yes$", out.decode(), re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.parametrize(("scene", "rows"), [("flood", 3), ("deadline", 2)])
async def test_the_demo_scene_completes(scene: str, rows: int) -> None:
    async with demo(f"--{scene}") as process:
        out, err = await asyncio.wait_for(process.communicate(), TEST_TIMEOUT_S)

    assert (process.returncode, err.decode()) == (0, "")
    _, shown, closing = out.decode().split("\n\n")
    table = shown.splitlines()
    assert table[0].startswith("ORDER")
    assert len(table) == 1 + rows
    assert "first come, first served" in closing or "instead of" in closing
