"""An engine on a thread of this process, as its own process runs it, with a socket for fronts."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.executor import Executor
from penstock.server.link.dispatch import Dispatcher
from penstock.server.link.engine_loop import EngineLoop
from penstock.server.link.frames import EngineHello
from penstock.server.link.front_connections import FrontConnections


@contextlib.contextmanager
def engine_on_socket(engine: Engine, executor: Executor) -> Generator[Path]:
    """Run it meanwhile; the socket that fronts use."""
    config = SchedulerConfig()
    hello = EngineHello(
        epoch=1,
        model=executor.info.name,
        executor=executor.info,
        max_num_waiting=config.max_num_waiting,
        max_num_waiting_tokens=config.max_num_waiting_tokens,
    )
    with (
        tempfile.TemporaryDirectory(prefix="penstock-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        path = Path(folder) / "engine.sock"
        listener.bind(str(path))
        listener.listen()
        hub = FrontConnections(listener, Dispatcher(engine, hello))
        loop = EngineLoop(hub.dispatcher, hub, time.monotonic)
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            yield path
        finally:
            loop.stop()
            thread.join()
            hub.close()
