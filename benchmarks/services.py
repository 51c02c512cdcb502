"""Starts services, other processes and the C++ load client for benchmarks.

Runs the processes, reads their output and measures their CPU time. All processes use 127.0.0.1 and
end with the `with` block that started them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import psutil

import native_build
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import options_pb2, prompt_pb2
from report import RunFailed

TIMEOUT_S = 60.0
ALL_CORES = os.sched_getaffinity(0)
MEASURED = ("--log-level", "error", "--drain-timeout-s", "0.1")
"""Options of a service in speed measurements."""
_NUM_KEPT_LINES = 200
_PLACE = re.compile(r"penstock (ready|operations|metrics) on (\S+)")
_CHILD = re.compile(r"supervised_process: (engine|front) ?\d* is ready: pid=(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A process of the service that is ready; `at_s`: when it became so, on the monotonic clock."""

    pid: int
    at_s: float


class Service:
    """A `penstock serve` process and its output. `up`: processes that became ready, by role, oldest
    first (empty if the log is off). `log`: the last lines of the log.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.up: dict[str, list[Ready]] = {"engine": [], "front": []}
        self.log: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self._places: dict[str, str] = {}
        self._num_open = 2
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (process.stdout, process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def address(self) -> str:
        """Host and port of the gRPC server."""
        return self._places["ready"]

    @property
    def port(self) -> int:
        """Port of the gRPC server."""
        return int(self.address.rpartition(":")[2])

    @property
    def operations(self) -> str:
        """The address of the operations port, if that was enabled."""
        return self._places["operations"]

    @property
    def metrics(self) -> str:
        """The host and port that Prometheus scrapes, if that was enabled."""
        return urllib.parse.urlsplit(self._places["metrics"]).netloc

    def pids(self, role: str) -> list[int]:
        """Return the current process ids of "front", "engine" or "observer"."""
        module = f"penstock.server.processes.{role}_process"
        found: list[int] = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if module in child.cmdline():
                    found.append(child.pid)
        return found

    def wait_until_ready(self, role: str, count: int) -> Ready:
        """Wait until `count` processes of `role` have become ready since the start; return the last
        of these. Raises RunFailed after a minute.
        """
        self._wait_until(lambda: len(self.up[role]) >= count, f"{role} number {count}")
        return self.up[role][count - 1]

    def wait_until_printed(self, *places: str) -> None:
        """Wait until the service has printed these addresses. Raises RunFailed."""
        self._wait_until(lambda: self._places.keys() >= set(places), "the service")

    def total(self, name: str) -> float:
        """Return the sum of a metric over all labels."""
        with urllib.request.urlopen(self._places["metrics"], timeout=TIMEOUT_S) as answer:
            text: str = answer.read().decode()
        samples = re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
        return sum(map(float, samples))

    def end(self) -> int | None:
        """Send SIGTERM and wait; return the exit code, None if the process had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait_for_exit()

    def wait_for_exit(self) -> int | None:
        """Wait for the exit; return the exit code, None if the process had to be killed."""
        try:
            code: int | None = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(TIMEOUT_S)
        return code

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or not self._num_open, timeout=TIMEOUT_S)
        if not condition():
            raise RunFailed(f"{what} did not become ready:\n" + "".join(self.log))

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            at_s = time.monotonic()
            with self._changed:
                self.log.append(line)
                if found := _PLACE.match(line):
                    self._places[found[1]] = found[2]
                if found := _CHILD.search(line):
                    self.up[found[1]].append(Ready(pid=int(found[2]), at_s=at_s))
                self._changed.notify_all()
        stream.close()
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()


@contextlib.contextmanager
def service(
    *options: str,
    num_fronts: int | None = 1,
    has_operations: bool = False,
    has_metrics: bool = False,
    environment: Mapping[str, str] | None = None,
    module: str = "penstock.tools",
) -> Generator[Service]:
    """Start a service with these options on all cores and wait until it is ready. `num_fronts`
    None: the default number. Raises RunFailed if it does not start.
    """
    os.sched_setaffinity(0, ALL_CORES)
    started = subprocess.Popen(
        (
            *(sys.executable, "-m", module, "serve", "--port", "0"),
            *("--operations-port", "0" if has_operations else "off"),
            *("--metrics-port", "0" if has_metrics else "off"),
            *(() if num_fronts is None else ("--fronts", str(num_fronts))),
            *options,
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    found = Service(started)
    extras = (("operations", has_operations), ("metrics", has_metrics))
    try:
        found.wait_until_printed("ready", *(name for name, is_enabled in extras if is_enabled))
        yield found
    finally:
        if started.poll() is None:
            # A second SIGTERM ends the service at once, even with running requests.
            started.send_signal(signal.SIGTERM)
            found.end()


def simulated(step_s: float, **settings: object) -> tuple[str, ...]:
    """Return options for a simulated executor in which every step takes `step_s` seconds.

    `settings`: other fields of SimulatedConfig; they take precedence.
    """
    coefficients = dict.fromkeys(("prefill_token_s", "decode_slot_s", "context_token_s"), 0.0)
    config = {"is_real_time": True, "cost": {"step_s": step_s, **coefficients}, **settings}
    return ("--executor", "simulated", "--simulated-config", json.dumps(config))


def capacity(num_streams: int, num_tokens: int) -> tuple[str, ...]:
    """Return server options with which `num_streams` streams of `num_tokens` tokens can run
    together.

    The pipeline depth is 2, so that the engine's work between steps does not delay the next step.
    """
    num_seqs = max(8, num_streams)
    return (
        *("--max-num-seqs", str(num_seqs), "--max-num-batched-tokens", str(max(8192, num_seqs))),
        *("--max-num-waiting", str(4 * num_seqs), "--max-seq-len", str(num_tokens + 96)),
        *("--block-size", "64", "--num-blocks", str(num_seqs * (num_tokens // 64 + 3))),
        # With deliberately slow steps, every request would be predicted late.
        *("--pipeline-depth", "2", "--deadline-admission", "off"),
    )


def request(num_tokens: int, num_prompt: int = 4) -> bytes:
    """Return an encoded request with a prompt of `num_prompt` ids and `num_tokens` output
    tokens."""
    return pb.GenerateRequest(
        token_prompt=prompt_pb2.TokenPrompt(ids=range(5, 5 + num_prompt)),
        sampling=options_pb2.SamplingOptions(temperature=0.0),
        stopping=options_pb2.StoppingOptions(max_tokens=num_tokens, ignore_eos=True),
    ).SerializeToString()


def run_client(
    role: str, options: dict[str, object], *, limit_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Run the load client; return its results. Raises RunFailed if it failed, CannotBuild if it
    cannot be built."""
    done = subprocess.run(
        client_command(role, options),
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s + 10.0,
    )
    if done.returncode != 0:
        raise RunFailed(done.stderr.strip() or f"the load client exited with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def client_command(role: str, options: dict[str, object]) -> list[str]:
    """Return the load client's command; bytes are passed in hexadecimal. Raises CannotBuild."""
    listed = {f"--{name}": v.hex() if isinstance(v, bytes) else v for name, v in options.items()}
    words = [str(word) for pair in listed.items() for word in pair]
    return [str(native_build.load_client()), role, *words]


@contextlib.contextmanager
def process(
    *command: str, environment: Mapping[str, str] | None = None
) -> Generator[subprocess.Popen[str]]:
    """Start a process on all cores; terminate it at the end, then kill it if it does not exit."""
    os.sched_setaffinity(0, ALL_CORES)
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        for stream in (started.stdin, started.stdout):
            if stream is not None:
                stream.close()


def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line of the process's stdout, "" at its end. Raises RunFailed if nothing
    arrives for a minute.
    """
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], TIMEOUT_S)[0]:
        raise RunFailed(f"{process.args!r} printed nothing")
    return process.stdout.readline()


def expect_ready(process: subprocess.Popen[str]) -> None:
    """Wait until the process prints "ready". Raises RunFailed otherwise."""
    if line_of(process).strip() != "ready":
        time.sleep(0.1)  # its error message is on the inherited stderr
        raise RunFailed(f"{process.args!r} did not start: exit code {process.poll()}")


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used, seconds."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def machine_s() -> float:
    """Return the CPU time used by all processes of the machine since boot, seconds."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def pin(pids: list[int], cores: set[int]) -> None:
    """Pin all threads of these processes to `cores`."""
    for pid in pids:
        for thread in psutil.Process(pid).threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
