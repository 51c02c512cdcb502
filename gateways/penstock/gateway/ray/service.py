"""Starts and ends the `penstock serve` process of a replica, and reads its addresses.

Uses neither Ray nor gRPC. The service is a separate process, so that it has the same processes as
without Serve: a supervisor, fronts (gRPC server processes), and an engine that is replaced when it
dies.

Also defines and validates the settings of a deployment, the `args` of Serve's config. The number of
replicas and their resources are in Serve's part of the config.
"""

import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, cast

from penstock.server.cli.serve import OPERATIONS_LINE, READY_LINE

logger = logging.getLogger(__name__)

_ENDED = ""
_PARENT_GUARD = Path(__file__).with_name("parent_guard.py")
# The replica chooses the addresses, and no other process needs them.
RESERVED = ("--host", "--port", "--operations-host", "--operations-port")


class ReplicaServiceFailed(Exception):
    """The service did not start, or has ended. The message is for operators."""


def command_line(options: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs `penstock serve` with these options, through `parent_guard.py`,
    so that it ends with the replica. Without `--fronts` it has one front (gRPC server process).

    Raises ValueError naming the option, if the options contain one that only the replica may set.
    """
    for option in options:
        flag = option.partition("=")[0]
        if flag in RESERVED:
            raise ValueError(f"serve_options: {flag} is set by the replica")
    # The relay has one connection, which one front serves.
    fronts = () if any(o.partition("=")[0] == "--fronts" for o in options) else ("--fronts", "1")
    addresses = ("--host", "127.0.0.1", "--port", "0", "--operations-port", "0")
    serve = (sys.executable, "-m", "penstock.tools", "serve")
    return (sys.executable, str(_PARENT_GUARD), *serve, *addresses, *fronts, *options)


class ReplicaService:
    """A running service. `address` and `operations` are HOST:PORT on the loopback interface.

    The constructor starts it and waits until it is ready. Raises ValueError for an option that only
    the replica may set, and ReplicaServiceFailed if the service ends instead or is not ready within
    `start_timeout_s` seconds.
    """

    def __init__(
        self,
        options: Sequence[str],
        *,
        start_timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            command_line(options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Serve handles Ctrl-C in the terminal of a node.
        )
        assert self._process.stdout is not None
        # The service logs to stderr, which is that of the replica. Its stdout has the addresses,
        # and must be read to the end, because a full pipe would block the service.
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), daemon=True, name="penstock-stdout"
        )
        self._reader.start()
        try:
            deadline_s = time.monotonic() + start_timeout_s
            self.address = self._printed_value(READY_LINE, deadline_s)
            self.operations = self._printed_value(OPERATIONS_LINE, deadline_s)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The process id of the service's supervisor."""
        return self._process.pid

    def check(self) -> None:
        """Raise ReplicaServiceFailed if the process of the service has ended.

        A restart of the engine is not an error, because requests continue after it.
        """
        code = self._process.poll()
        if code is not None:
            raise ReplicaServiceFailed(f"penstock serve ended with {code}")

    def drain(self, timeout_s: float) -> None:
        """Send SIGTERM to the service and wait for its end; kill it after `timeout_s` seconds.

        Running requests may continue for the drain timeout of the service.
        """
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                logger.warning("penstock serve did not end within %g s", timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill the service, including its engine and its front processes."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                logger.info("%s", line.rstrip())
                self._lines.put(line)
        self._lines.put(_ENDED)

    def _printed_value(self, pattern: re.Pattern[str], deadline_s: float) -> str:
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise ReplicaServiceFailed("penstock serve was not ready in time") from None
            if line == _ENDED:
                raise ReplicaServiceFailed(f"penstock serve ended with {self._process.wait()}")
            if found := pattern.match(line):
                return found[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a deployment.

    Attributes:
        serve_options: Options of `penstock serve`, the same for each replica.
        start_timeout_s: Seconds for the service to become ready, including loading its model.
        stop_timeout_s: Seconds for the shutdown of the service. Must be less than Serve's
            `graceful_shutdown_timeout_s`, because that time starts earlier.
    """

    serve_options: tuple[str, ...] = ()
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise ValueError naming the field, if one is invalid."""
        command_line(self.serve_options)
        for name in ("start_timeout_s", "stop_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be above 0, not {getattr(self, name)}")


def settings_of(args: Mapping[str, Any]) -> Settings:
    """Return the settings in `args`. Raises ValueError naming the setting, if one is unknown or
    invalid.
    """
    known = {field.name for field in fields(Settings)}
    if unknown := sorted(set(args) - known):
        raise ValueError(f"args: unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    values = dict(args)
    if "serve_options" in values:
        values["serve_options"] = _texts(values["serve_options"])
    for name in known & {"start_timeout_s", "stop_timeout_s"} & set(values):
        if isinstance(values[name], bool) or not isinstance(values[name], int | float):
            raise ValueError(f"{name}: must be a number of seconds, not {values[name]!r}")
    return Settings(**values)


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"serve_options: must be a list, not {value!r}")
    texts: list[str] = []
    for item in cast("Sequence[object]", value):
        if not isinstance(item, str):
            raise ValueError(f"serve_options: {item!r} is not a string; put it in quotes")
        texts.append(item)
    return tuple(texts)
