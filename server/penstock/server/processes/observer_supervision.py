"""Restarts the observer process, unless it crashes repeatedly.

Owns the ports and the socket, which remain open when an observer dies. If the observer crashes
repeatedly, the service continues without it.
"""

import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

from penstock.server.config import ObserverLaunch, encode_launch
from penstock.server.ipc.control_frames import FromChild
from penstock.server.observe.config import ObserverConfig
from penstock.server.processes.child import Child
from penstock.server.processes.service_sockets import listen, reserve_port
from penstock.server.processes.spawn_context import (
    OBSERVER_MODULE,
    SpawnContext,
    observer_environment,
)
from penstock.server.processes.supervised_process import CrashLoop, SupervisedProcess

logger = logging.getLogger(__name__)

_BACKLOG = 64


class ObserverSupervision:
    """Restarts the observer process when it ends.

    `spawn_context` returns the resources for each start. `start` starts a child and registers it,
    see `Orphans.start`. `on_message` receives the observer's messages.
    """

    def __init__(
        self,
        config: ObserverConfig,
        *,
        spawn_context: Callable[[], SpawnContext],
        start: Callable[[Callable[[], Awaitable[Child]]], Awaitable[Child]],
        on_message: Callable[[FromChild], None],
    ) -> None:
        self.process = SupervisedProcess("observer", self._spawn, on_message=on_message)
        self.socket_path: Path | None = None
        self._config = config
        self._spawn_context = spawn_context
        self._start = start
        self._listener: socket.socket | None = None
        self._ports: dict[str, int | None] = {"metrics_port": None, "operations_port": None}

    def open(self, folder: Path, stack: ExitStack) -> None:
        """Reserve the ports, and listen for fronts (gRPC server processes) on a Unix socket in
        `folder`. `stack` closes all of these.

        Raises PortUnavailable if a port or the socket cannot be bound. The message names the option
        to change.
        """
        for name in self._ports:
            wanted: int | None = getattr(self._config, name)
            if wanted is None:
                continue
            flag = f"--{name.replace('_', '-')}"
            host = self._config.operations_host
            reserved = stack.enter_context(
                reserve_port(host, wanted, flag=flag, host_flag="--operations-host")
            )
            self._ports[name] = reserved.getsockname()[1]
        self.socket_path = folder / "observer.sock"
        self._listener = listen(stack, self.socket_path, _BACKLOG)

    async def keep_alive(self) -> int:
        """Run `SupervisedProcess.keep_alive`, but return 0 after repeated crashes, because the
        service continues without an observer. Raises ChildFailed if the first start fails."""
        try:
            return await self.process.keep_alive()
        except CrashLoop as failure:
            logger.error("%s: the service continues without it", failure)  # noqa: TRY400 (in one line)
            return 0
        finally:
            # From now on fronts cannot connect, and fronts no longer buffer records.
            if self._listener is not None:
                self._listener.close()

    @property
    def operations_address(self) -> str | None:
        """The address of the operators' API; None if it is not served."""
        port = self._ports["operations_port"]
        return None if port is None else f"{self._host}:{port}"

    @property
    def metrics_url(self) -> str | None:
        """The URL of the Prometheus metrics; None if they are not served. The status page is at the
        root."""
        port = self._ports["metrics_port"]
        scheme = "https" if self._spawn_context().config.security.has_tls else "http"
        return None if port is None else f"{scheme}://{self._host}:{port}/metrics"

    @property
    def _host(self) -> str:
        host = self._config.operations_host
        return f"[{host}]" if ":" in host else host

    async def _spawn(self) -> Child:
        assert self._listener is not None
        now = self._spawn_context()
        launch = ObserverLaunch(
            server=now.config,
            socket_path=now.socket_path,
            listener_fd=self._listener.fileno(),
            flight_fd=now.flight_fd,
            metrics_port=self._ports["metrics_port"],
            operations_port=self._ports["operations_port"],
            started_s=now.started_s,
            board_fd=now.board_fd,
        )
        fds = (launch.listener_fd, launch.flight_fd, launch.board_fd)
        return await self._start(
            lambda: Child.spawn(
                "observer",
                OBSERVER_MODULE,
                encode_launch(launch),
                environment=observer_environment(now.config.observer.tracing),
                inherited_fds=[fd for fd in fds if fd >= 0],
            )
        )
