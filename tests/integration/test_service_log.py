"""What `penstock serve` logs for probes, for a killed front and for a clean stop."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket

from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.resumed import resumable
from support.service import Service, simulated, started

MESSAGE = re.compile(r"^\S+Z (?P<level>[A-Z]+) \S+ \S+: (?P<text>.*)$")


def lines_of(service: Service) -> list[tuple[str, str]]:
    found = [MESSAGE.match(line) for line in service.stderr]
    assert all(found), service.stderr
    return [(each["level"], each["text"]) for each in found if each is not None]


def probe(address: str) -> None:
    """Connect and close, as a load balancer's liveness probe does."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=30.0).close()


def probe_socket(path: str) -> None:
    """Connect to the engine socket and close, as a starting service does to detect folders of
    dead services.
    """
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(path)


async def test_probes_and_a_clean_stop_log_nothing() -> None:
    arguments = ("--fronts", "2", "--operations-port", "0", "--metrics-port", "0")
    async with started(*simulated(), *arguments) as service:
        engine_socket = (await service.until_logged("starting:")).split("socket=")[1].strip()
        metrics = (
            (await service.printed_address("metrics"))
            .removeprefix("http://")
            .removesuffix("/metrics")
        )
        operations = await service.printed_address("operations")
        # stdout and stderr are separate pipes: wait for the end of the start in both.
        for role in ("engine", "front", "front", "observer"):
            await service.next_pid(role)
        num_lines = len(service.stderr)
        for _ in range(3):
            for address in (service.address, operations, metrics):
                await asyncio.to_thread(probe, address)
            probe_socket(engine_socket)
            probe_socket(engine_socket.replace("engine.sock", "observer.sock"))
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
    after = lines_of(service)[num_lines:]
    assert [level for level, _ in after] == ["INFO"], after
    assert after[0][1].startswith("SIGTERM: draining")
    reported = [text for _, text in lines_of(service)]
    announced = [line.strip() for line in service.stdout]
    assert len(announced) == 3
    assert len({*reported, *announced}) == len(reported) + len(announced), (
        "something is there twice"
    )
    assert not [text for text in reported for line in announced if line in text]


async def test_a_killed_front_is_reported_once_and_consistently() -> None:
    async with started(*simulated(), "--fronts", "1") as service:
        front = await service.next_pid("front")
        async with service.channel() as channel:
            call = pb_grpc.GenerationServiceStub(channel).Generate(resumable(num_tokens=900))
            await call.read()
            os.kill(front, signal.SIGKILL)
            assert await service.next_pid("front") != front
            gone = await service.until_logged("front 1 is lost")
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
    assert "resumable requests: 1" in gone
    assert "stopped" not in gone
    assert "cancelled" not in gone
    # Four lines: ready, died, disconnected from the engine, the next front ready.
    of_it = [text for _, text in lines_of(service) if "front " in text]
    assert ["ready" in text for text in of_it].count(True) == 2, of_it
    assert sum("front 1 died (killed by signal 9)" in text for text in of_it) == 1, of_it
    assert len(of_it) == 4, of_it
