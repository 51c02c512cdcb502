"""A service on the simulated executor with an observer, and what can be seen of it from outside.

Shared by the benchmarks of tracing. Owns the process and its pids; what it says on stderr goes to
ours. Everything is on 127.0.0.1 and ends with the block that started it.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Generator

import psutil

from simulated_service import PATIENCE_S, RunFailed

_MAX_READS = 50
_READY = re.compile(r"penstock ready on (\S+):(\d+) .*\n")
_METRICS = re.compile(r"penstock metrics on (\S+)\n")
_SAMPLE = re.compile(r"^(?P<name>[a-z_]+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')
_MODULES = {
    "front": "penstock.server.processes.front_process",
    "engine": "penstock.server.processes.engine_process",
    "observer": "penstock.server.processes.observer_process",
}


class ObservedService:
    """One that is ready. `metrics_url` is empty where it has no such port."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, metrics_url: str) -> None:
        self.process = process
        self.port = port
        self.metrics_url = metrics_url

    def pids(self, role: str) -> list[int]:
        """Process ids as they are now of "front", "engine" or "observer"."""
        module = _MODULES[role]
        found: list[int] = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if module in child.cmdline():
                    found.append(child.pid)
        return found

    def totals(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """A metric's values as of now, by those of its labels, added up over the others."""
        with urllib.request.urlopen(self.metrics_url, timeout=PATIENCE_S) as answer:
            text: str = answer.read().decode()
        found: dict[tuple[str, ...], float] = {}
        for sample in _SAMPLE.finditer(text):
            if sample["name"] == name:
                values = dict(_LABEL.findall(sample["labels"]))
                key = tuple(values[label] for label in labels)
                found[key] = found.get(key, 0.0) + float(sample["value"])
        return found

    def total(self, name: str) -> float:
        """All values of a metric, added up."""
        return sum(self.totals(name).values())

    def end(self) -> int | None:
        """Ask it to end and wait; its exit code, None if it had to be killed."""
        return _end(self.process)


@contextlib.contextmanager
def observed_service(
    *options: str, environment: dict[str, str], has_metrics: bool
) -> Generator[ObservedService]:
    """`penstock serve --executor simulated` with these options, ready. Raises RunFailed."""
    command = (
        *(sys.executable, "-m", "penstock.tools", "serve", "--executor", "simulated"),
        *("--port", "0", "--operations-port", "off"),
        *("--metrics-port", "0" if has_metrics else "off"),
    )
    with subprocess.Popen(
        (*command, *options),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment,
    ) as process:
        try:
            ready, *metrics = _said(process, _READY, *((_METRICS,) if has_metrics else ()))
            yield ObservedService(process, int(ready[2]), metrics[0][1] if metrics else "")
        finally:
            if process.poll() is None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> int | None:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def _said(process: subprocess.Popen[bytes], *patterns: re.Pattern[str]) -> list[re.Match[str]]:
    """What it says of itself, once it has said all of that."""
    assert process.stdout is not None
    text = ""
    for _ in range(_MAX_READS):
        found = [pattern.search(text) for pattern in patterns]
        if all(found):
            return [each for each in found if each is not None]
        if not select.select([process.stdout], [], [], PATIENCE_S)[0]:
            break
        data = os.read(process.stdout.fileno(), 4096)
        if not data:
            break
        text += data.decode()
    raise RunFailed(f"the service did not say where it is: {text!r}")
