"""The source of the peers' tokens: paced by its schedule, whole at any border of reads."""

import asyncio
import contextlib
import importlib
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def peers() -> Any:
    return importlib.import_module("delivery_peers")


def frame(step: int, tokens: list[int]) -> bytes:
    return struct.pack(f"<II{len(tokens)}I", step, len(tokens), *tokens)


class Written:
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


@pytest.mark.parametrize("num_bytes", [1, 3, 7, 1000])
async def test_each_stream_gets_its_token_however_the_frames_are_cut(
    peers: Any, num_bytes: int
) -> None:
    source, transport = peers.Source(), Written()
    source.connection_made(transport)
    got: list[list[int]] = [[], [], []]
    for sink in got:
        source.add(sink.append)
    assert transport.data == b"+++"
    data = frame(0, [5, 6, 7]) + frame(1, [8, 9, 10])
    for start in range(0, len(data), num_bytes):
        source.data_received(data[start : start + num_bytes])
    assert got == [[5, 8], [6, 9], [7, 10]]


async def test_an_outbox_gives_everything_since_the_last_time(peers: Any) -> None:
    outbox = peers.Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    for token in (1, 2, 3):
        outbox.push(token)
    assert await taking == [1, 2, 3]
    outbox.push(4)
    assert await outbox.take() == [4]


def test_the_producer_begins_when_all_streams_are_open(peers: Any, tmp_path: Path) -> None:
    path, schedule = str(tmp_path / "source.sock"), tmp_path / "schedule"
    producer = threading.Thread(target=peers.produce, args=(path, 2, 0.001, schedule), daemon=True)
    producer.start()
    with socket.socket(socket.AF_UNIX) as server:
        while producer.is_alive():
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                server.connect(path)
                break
        server.sendall(b"+")
        assert not schedule.exists()
        server.sendall(b"+")
        frames = [struct.unpack("<IIII", server.recv(16, socket.MSG_WAITALL)) for _ in range(3)]
        assert int(schedule.read_text()) > 0
    assert [step for step, *_ in frames] == [0, 1, 2]
    assert {num_tokens for _, num_tokens, *_ in frames} == {2}
    producer.join(10)
    assert not producer.is_alive()
