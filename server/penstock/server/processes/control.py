"""Connects a child process to the supervisor.

The connection carries the launch parameters, the startup report and commands. It is a socket pair;
this module uses the child's end. The command to stop is sent over it, not as a signal: service
managers signal a whole process tree, and an engine that stopped on such a signal would interrupt
the streams that the fronts (gRPC server processes) are draining. When the supervisor dies, its end
closes and the child ends immediately.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

from penstock.server.config import EngineLaunch, FrontLaunch, ObserverLaunch, decode_launch
from penstock.server.ipc.control_frames import (
    FROM_CHILD,
    TO_CHILD,
    EngineLost,
    FromChild,
    Launch,
    Ready,
    StartFailed,
    Stop,
    StopReceived,
    ToChild,
)
from penstock.server.ipc.wire import FrameBuffer, FrameError
from penstock.server.observe.logs import configure_logging
from penstock.server.processes.exit_codes import EXIT_OK, EXIT_ORPHANED

LaunchT = TypeVar("LaunchT", EngineLaunch, FrontLaunch, ObserverLaunch)
_MAX_LAUNCH_BYTES = 1 << 20


def begin(
    arguments: list[str],
    launch_type: type[LaunchT],
    name: str,
    *,
    before_exit: Callable[[], object] | None = None,
) -> "tuple[ChildControl, LaunchT]":
    """Connect to the supervisor and start logging; return the connection and the launch parameters.

    `name` is the name of the process in the log. `arguments` are the arguments of the program; the
    first is the inherited descriptor. For `before_exit` see `watch_supervisor`.
    """
    control = ChildControl(int(arguments[0]))
    launch = decode_launch(launch_type, control.read_launch())
    control.watch_supervisor(launch.socket_path, before_exit)
    server = launch.server
    configure_logging(
        name,
        server.log_level,
        form=server.log_format,
        has_exception_messages=server.log_exception_messages,
    )
    return control, launch


def exit_at_once(code: int) -> NoReturn:
    """Terminate this process without the shutdown of libraries.

    The kernel frees memory faster than torch does, and this does not wait for threads that hang in
    network calls.
    """
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


class ChildControl:
    """The child's end of the connection to the supervisor, from the inherited descriptor
    `control_fd`.

    The constructor makes this process ignore SIGTERM, SIGINT, SIGUSR1 and SIGUSR2, so create this
    object first.
    """

    def __init__(self, control_fd: int) -> None:
        self._socket = socket.socket(fileno=control_fd)
        # Programs that this process starts must not inherit the connection.
        self._socket.set_inheritable(False)
        self._frames = FrameBuffer(_MAX_LAUNCH_BYTES)
        self._early: deque[ToChild] = deque()
        self._socket_path: Path | None = None
        self._stop: Callable[[], object] | None = None
        self._on_engine_lost: Callable[[], object] | None = None
        self._before_exit: Callable[[], object] | None = None
        self.drain_timeout_s: float | None = None
        """The drain timeout in the command to stop, in seconds; None for the configured one."""
        self.has_successor = False
        """True if a successor has taken over from this process, which is stopping."""
        # SIGUSR1 makes the supervisor write the flight record, and SIGUSR2 makes it do a rolling
        # restart. Service managers may send both to the whole process tree, so child processes
        # ignore them.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)

    def read_launch(self) -> bytes:
        """Wait for the encoded launch parameters and return them. The supervisor sends them first.

        Terminates the process if the connection ends, or a frame is invalid, before they arrive.
        """
        with contextlib.suppress(OSError, FrameError):
            for first, *rest in self._received():
                if isinstance(first, Launch):
                    # The command to stop may arrive in the same read.
                    self._early.extend(rest)
                    return first.settings
        os._exit(EXIT_ORPHANED)

    def watch_supervisor(
        self, socket_path: Path, before_exit: Callable[[], object] | None = None
    ) -> None:
        """From now on, when the supervisor dies, remove the folder of the service's sockets, call
        `before_exit`, and terminate this process.

        A thread watches the connection and does this, so it works while the main thread computes.
        """
        self._socket_path = socket_path
        self._before_exit = before_exit
        threading.Thread(target=self._watch, name="control-connection", daemon=True).start()

    def on_stop(self, stop: Callable[[], object]) -> None:
        """Register `stop`, to be called on another thread when the command to stop arrives.

        Until this registration, while the process loads, the command ends the process immediately.
        """
        self._stop = stop

    def on_engine_lost(self, call: Callable[[], object]) -> None:
        """Register `call`, to be called on another thread when the supervisor reports that no
        further engine will be started."""
        self._on_engine_lost = call

    def report_ready(self, **facts: str | int | float | None) -> None:
        """Report to the supervisor that this process is serving. `facts` is the startup report."""
        self.send(Ready(facts=facts))

    def report_failure(self, error: BaseException, prefix: str = "") -> None:
        """Report to the supervisor why this process cannot start. The report is one line for the
        operator and begins with `prefix`."""
        self.send(StartFailed(message=prefix + in_one_line(error)))

    def send(self, frame: FromChild) -> None:
        """Send a message to the supervisor. Does nothing if the supervisor has died."""
        # When the supervisor is gone, the thread that watches the connection terminates this
        # process.
        with contextlib.suppress(OSError):
            self._socket.sendall(FROM_CHILD.encode(frame))

    def _received(self) -> Iterator[list[ToChild]]:
        """Yield non-empty batches of received frames until the connection ends."""
        while data := self._socket.recv(65536):
            frames = [TO_CHILD.decode(body) for body in self._frames.feed(data)]
            if frames:
                yield frames

    def _watch(self) -> None:
        with contextlib.suppress(OSError, FrameError):
            for frame in self._early:
                self._handle_frame(frame)
            for frames in self._received():
                for frame in frames:
                    self._handle_frame(frame)
        if self._socket_path is not None:
            _remove_folder(self._socket_path.parent)
        try:
            if self._before_exit is not None:
                self._before_exit()
        finally:
            os._exit(EXIT_ORPHANED)

    def _handle_frame(self, frame: ToChild) -> None:
        match frame:
            case EngineLost():
                if self._on_engine_lost is not None:
                    self._on_engine_lost()
            case Stop():
                if frame.drain_timeout_s is not None:
                    self.drain_timeout_s = frame.drain_timeout_s
                self.has_successor = frame.has_successor
                if self._stop is None:
                    os._exit(EXIT_OK)
                self.send(StopReceived())
                self._stop()
            case Launch():
                raise FrameError("settings were received twice")


def _remove_folder(folder: Path) -> None:
    """Remove the folder of the socket files. Other processes may be removing it too."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.sock"):
            path.unlink(missing_ok=True)
        folder.rmdir()


def in_one_line(error: BaseException) -> str:
    """Return a description of `error` in one line, without a traceback.

    The type of the error is included unless the message is meant for operators.
    """
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "out of memory" in text.lower():
        return f"out of memory: {text}" if text else "out of memory"
    is_worded_for_operators = type(error).__module__.startswith("penstock.")
    if text and (is_worded_for_operators or isinstance(error, ValueError | OSError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
