"""Runs an engine with a socket for fronts (gRPC server processes), as in the engine process."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path

from penstock.scheduler.engine import Engine
from penstock.scheduler.executor import Executor
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.engine.front_connections import FrontConnections
from penstock.server.engine.kept_streams import KeptLimits
from penstock.server.engine.loop import EngineLoop
from penstock.server.front.config import FrontConfig
from penstock.server.ipc.frames import EngineHello

MAX_NUM_WAITING = 4096


@contextlib.contextmanager
def listening(engine: Engine, executor: Executor, path: Path | str) -> Generator[FrontConnections]:
    """Listen for fronts on a socket at `path`; the caller polls the connections and steps the
    engine.
    """
    hello = EngineHello(
        epoch=1,
        model="benchmark",
        executor=executor.info,
        max_num_waiting=MAX_NUM_WAITING,
        max_num_waiting_tokens=1 << 24,
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        limits = FrontConfig()
        kept_limits = KeptLimits(
            max_bytes=limits.max_resume_bytes, max_unread=limits.max_detached_requests
        )
        connections = FrontConnections(listener, Dispatcher(engine, hello, kept_limits=kept_limits))
        try:
            yield connections
        finally:
            connections.close()


def engine_loop(connections: FrontConnections) -> EngineLoop:
    return EngineLoop(connections, time.monotonic)


@contextlib.contextmanager
def engine_on_socket(engine: Engine, executor: Executor) -> Generator[Path]:
    """Run the engine loop on a thread until the `with` block ends; yield the path of the socket for
    fronts.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / "engine.sock"
        with listening(engine, executor, path) as connections:
            loop = engine_loop(connections)
            thread = threading.Thread(target=loop.run)
            thread.start()
            try:
                yield path
            finally:
                loop.stop()
                thread.join()
