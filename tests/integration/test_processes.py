"""Runs `penstock serve` as a process: its start, its settings, its reaction to signals, and its
exit codes.
"""

import os
import re
import signal
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from support.ports import reusable_port
from support.service import Stream, health_of, launched, simulated, started

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_service_ends_at_the_first_signal(number: signal.Signals) -> None:
    async with started(*simulated()) as service, service.channel() as channel:
        assert await health_of(channel) == SERVING
        done = Stream(channel, 12)
        assert await done.outcome() is grpc.StatusCode.OK
        assert (done.num_tokens, done.has_finished) == (12, True)
        service.signal(number)
        assert await service.ended() == 0
        assert len(service.stdout) == 1
        assert not [line for line in service.stderr if "Traceback" in line]


async def test_signals_to_the_whole_tree_drain_it_too() -> None:
    async with started(*simulated(), "--fronts", "1") as service, service.channel() as channel:
        children = [await service.next_pid(role) for role in ("engine", "front")]
        running = Stream(channel, 100)
        await running.until_running()
        for pid in children:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        service.signal(signal.SIGTERM)
        assert await running.outcome() is grpc.StatusCode.OK
        assert await service.ended() == 0


async def test_a_signal_before_it_is_ready_ends_it() -> None:
    async with launched(*simulated()) as service:
        await service.until_logged("starting: model")
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


async def rejection(*arguments: str) -> str:
    """Return the one-line error of a service that cannot start."""
    async with launched(*arguments) as service:
        assert await service.ended() == 2
        assert service.stdout == []
        reported = [line for line in service.stderr if line.startswith("penstock serve: ")]
        assert len(reported) == 1
        assert not [line for line in service.stderr if "Traceback" in line]
        return reported[0]


async def test_a_second_service_does_not_share_the_port_and_a_next_one_may_have_it() -> None:
    port = str(reusable_port())
    async with started(*simulated(), "--port", port) as first:
        reported = await rejection(*simulated(), "--port", port)
        assert f"127.0.0.1:{port}" in reported
        assert "in use" in reported
        async with first.channel() as channel:
            assert await Stream(channel, 3).outcome() is grpc.StatusCode.OK
        first.signal(signal.SIGTERM)
        assert await first.ended() == 0
    async with started(*simulated(), "--port", port) as second, second.channel() as channel:
        assert await Stream(channel, 3).outcome() is grpc.StatusCode.OK


async def test_an_address_of_another_host_is_named() -> None:
    assert "203.0.113.1" in await rejection(*simulated(), "--host", "203.0.113.1")


async def test_a_broken_model_is_rejected_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert str(tmp_path) in await rejection("--model", str(tmp_path))


async def test_settings_come_from_the_environment_and_arguments_win() -> None:
    environment = {"PENSTOCK_MAX_NUM_SEQS": "3", "PENSTOCK_NUM_BLOCKS": "77"}
    arguments = [*simulated(), "--num-blocks", "1"]
    async with started(*arguments, environment=environment) as service:
        line = await service.until_logged("engine is ready")
        assert re.search(r"num_blocks=1 max_num_seqs=3\b", line)
        # A cache that is smaller than the context.
        assert "WARNING engine" in await service.until_logged("no request can reach")


async def test_a_misspelt_variable_is_reported_even_when_the_start_fails() -> None:
    environment = {"PENSTOCK_MODLE": "x", "PENSTOCK_ADDRESS": "127.0.0.1:1"}
    async with launched("--model", "/no/such/folder", environment=environment) as service:
        assert await service.ended() == 2
        assert "/no/such/folder" in service.stderr[-1]
    warnings = [line for line in service.stderr if "WARNING" in line]
    assert len(warnings) == 1
    assert "PENSTOCK_MODLE" in warnings[0]


def mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_fronts_load_neither_torch_nor_transformers() -> None:
    async with started("--executor", "torch", "--fronts", "2") as service:
        engine = await service.next_pid("engine")
        fronts = [await service.next_pid("front") for _ in range(2)]
        async with service.channel() as channel:
            assert await Stream(channel, 5).outcome() is grpc.StatusCode.OK
        assert "libtorch" in mapped_files(engine)
        assert "grpc" not in mapped_files(service.process.pid)
        for pid in fronts:
            maps = mapped_files(pid)
            assert "grpc" in maps  # the right process, loaded
            assert "libtorch" not in maps
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
