"""The `penstock serve` that a replica owns: its start, its addresses, its end.

Independent of Ray and gRPC. The service is a separate process, so that everything is as without
Serve: supervisor, fronts, an engine that may die and be replaced.

Owns the settings of a deployment: the `args` of Serve's config, validated. The number of replicas
and their resources are in Serve's part of the config.
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

log = logging.getLogger(__name__)

_READY = re.compile(r"penstock ready on (\S+) ")
_OPERATIONS = re.compile(r"penstock operations on (\S+)")
_ENDED = ""
_LEASH = Path(__file__).with_name("leash.py")
# The replica chooses the addresses, and no other process needs them.
RESERVED = ("--host", "--port", "--operations-host", "--operations-port")


class ServiceFailed(Exception):
    """The service did not start, or has ended; the message is for operators."""


def command_line(options: Sequence[str]) -> tuple[str, ...]:
    """Return the command for these options of `penstock serve`. Raises ValueError naming one we
    set.
    """
    for option in options:
        flag = option.partition("=")[0]
        if flag in RESERVED:
            raise ValueError(f"serve_options: {flag} is set by the replica")
    # The relay has one connection, which one front serves.
    fronts = () if any(o.partition("=")[0] == "--fronts" for o in options) else ("--fronts", "1")
    doors = ("--host", "127.0.0.1", "--port", "0", "--operations-port", "0")
    serve = (sys.executable, "-m", "penstock.tools", "serve")
    return (sys.executable, str(_LEASH), *serve, *doors, *fronts, *options)


class OwnService:
    """A running service; `address` and `operations` are HOST:PORT on the loopback interface.

    Starts it and waits until it is ready. Raises ServiceFailed if it ends instead, or is not ready
    within `start_timeout_s`.
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
            start_new_session=True,  # a Ctrl-C at a node's terminal is Serve's to handle
        )
        assert self._process.stdout is not None
        # Its log is on stderr, which is the replica's. Stdout has the addresses, and is read to its
        # end, or a full pipe would stop it.
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), daemon=True, name="penstock-stdout"
        )
        self._reader.start()
        try:
            deadline_s = time.monotonic() + start_timeout_s
            self.address = self._printed_value(_READY, deadline_s)
            self.operations = self._printed_value(_OPERATIONS, deadline_s)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The process id of the service's supervisor."""
        return self._process.pid

    def check(self) -> None:
        """Raise ServiceFailed if the service's process has ended. An engine restart does not count:
        the service handles it, and requests continue.
        """
        code = self._process.poll()
        if code is not None:
            raise ServiceFailed(f"penstock serve ended with {code}")

    def drain(self, timeout_s: float) -> None:
        """Order the service to finish, and wait; running requests have its grace period. Kill it
        after `timeout_s`.
        """
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                log.warning("penstock serve did not end within %g s", timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill the service, including engine and fronts."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                log.info("%s", line.rstrip())
                self._lines.put(line)
        self._lines.put(_ENDED)

    def _printed_value(self, pattern: re.Pattern[str], deadline_s: float) -> str:
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise ServiceFailed("penstock serve was not ready in time") from None
            if line == _ENDED:
                raise ServiceFailed(f"penstock serve ended with {self._process.wait()}")
            if found := pattern.match(line):
                return found[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`serve_options`: options of `penstock serve`, the same for each replica. `start_timeout_s`:
    until the service is ready, with its model loaded. `stop_timeout_s`: for its shutdown; less than
    Serve's `graceful_shutdown_timeout_s`, which starts earlier.
    """

    serve_options: tuple[str, ...] = ()
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise ValueError naming an invalid field."""
        command_line(self.serve_options)
        for name in ("start_timeout_s", "stop_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be above 0, not {getattr(self, name)}")


def settings_of(args: Mapping[str, Any]) -> Settings:
    """Return the settings in `args`. Raises ValueError naming an unknown or invalid one."""
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
