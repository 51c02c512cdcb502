"""Messages between the processes of the load generator, over a `multiprocessing` pipe that an event
loop reads.

`penstock.server.ipc.wire` is not used, because its frames are limited to 64 MiB and a plan may have
a million requests.
"""

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from penstock.server.ipc.wire import TaggedFrame
from penstock.tools.bench.latency_histogram import LatencyHistogram
from penstock.tools.bench.plan import LoadPlan
from penstock.tools.bench.recorder import LoadRecorder
from penstock.tools.bench.sender import SenderConfig


class Connect(TaggedFrame, frozen=True, kw_only=True):
    """The first message to a process: a command to connect to the service."""

    config: SenderConfig


class Prepare(TaggedFrame, frozen=True, kw_only=True):
    """A command to prepare the part of this plan that process `worker` (from 0) of `num_workers`
    executes.
    """

    plan: LoadPlan
    worker: int
    num_workers: int


class Start(TaggedFrame, frozen=True, kw_only=True):
    """A command to begin the prepared run when the monotonic clock is at `at_s`. All processes of a
    machine share this clock.
    """

    at_s: float


class WorkerReady(TaggedFrame, frozen=True):
    """Reports that the process is connected to the service or, after Prepare, ready for Start."""


class Unreachable(TaggedFrame, frozen=True, kw_only=True):
    """Reports that the process could not connect to the service; the process then exits. `code`:
    the name of the gRPC status; the other fields have the same meaning as in `Failure`.
    """

    code: str
    message: str
    reason: str


class WorkerProgress(TaggedFrame, frozen=True, kw_only=True):
    """The numbers of requests of one process since the start of the run, including the warm-up."""

    num_sent: int = 0
    num_ended: int = 0
    num_failed: int = 0


class WorkerDone(TaggedFrame, frozen=True, kw_only=True):
    """The record of one process. `cpu_share`: its CPU time during the run, as a share of a core."""

    recorder: LoadRecorder
    cpu_share: float


Message: TypeAlias = (
    Connect | Prepare | Start | WorkerReady | Unreachable | WorkerProgress | WorkerDone
)


def encode(message: Message) -> bytes:
    """Encode a message."""
    return msgspec.msgpack.encode(message, enc_hook=_plain)


def decode(data: bytes) -> Message:
    """Decode a message that `encode` returned."""
    message: Message = msgspec.msgpack.decode(data, type=Message, dec_hook=_restored)
    return message


def _plain(value: Path | LatencyHistogram) -> Any:
    return str(value) if isinstance(value, Path) else value.state()


def _restored(kind: type, plain: Any) -> Path | LatencyHistogram:
    return Path(plain) if kind is Path else LatencyHistogram.from_state(*plain)


class MessagePipe:
    """One end of a pipe between two processes."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection

    def send(self, message: Message) -> None:
        """Send a message; blocks while the pipe is full. Raises OSError when the other end is
        closed.
        """
        self._connection.send_bytes(encode(message))

    async def receive(self) -> Message:
        """Wait for the next message and return it. Raises EOFError when the other end is closed."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        number = self._connection.fileno()
        loop.add_reader(number, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(number)
        try:
            return decode(self._connection.recv_bytes())
        except ConnectionResetError:
            raise EOFError from None

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
