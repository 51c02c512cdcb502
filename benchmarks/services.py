"""Starts services, other processes and the C++ load client for benchmarks.

Owns the processes, what they state of themselves and what they cost. Everything is on 127.0.0.1 and
ends with the block that started it.
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

PATIENCE_S = 60.0
ALL_CORES = os.sched_getaffinity(0)
MEASURED = ("--log-level", "error", "--drain-grace-s", "0.1")
"""Options of a service that only its speed is asked of."""
_NUM_KEPT_LINES = 200
_PLACE = re.compile(r"penstock (ready|operations|metrics) on (\S+)")
_CHILD = re.compile(r"supervised_process: (engine|front) ?\d* is ready: pid=(\d+)")
_SAMPLE = re.compile(r"^(?P<name>[a-z_]+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


class RunFailed(Exception):
    """Something could not be measured; the message is what its processes stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A process of the service is up; `at_s` on the monotonic clock."""

    pid: int
    at_s: float


class Service:
    """A `penstock serve` and what it stated. `up`: what became ready, by role, oldest first, unless
    its log is off; `log`: the last lines of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.up: dict[str, list[Ready]] = {"engine": [], "front": []}
        self.log: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self._places: dict[str, str] = {}
        self._num_open = 2
        self._news = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (process.stdout, process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def address(self) -> str:
        """Host and port of gRPC."""
        return self._places["ready"]

    @property
    def port(self) -> int:
        """Of gRPC."""
        return int(self.address.rpartition(":")[2])

    @property
    def operations(self) -> str:
        """Where operators call; it has such a port if that was asked for."""
        return self._places["operations"]

    @property
    def metrics(self) -> str:
        """The host and port that Prometheus scrapes, if that was asked for."""
        return urllib.parse.urlsplit(self._places["metrics"]).netloc

    def pids(self, role: str) -> list[int]:
        """Process ids as they are now of "front", "engine" or "observer"."""
        module = f"penstock.server.processes.{role}_process"
        found: list[int] = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if module in child.cmdline():
                    found.append(child.pid)
        return found

    def until_up(self, role: str, count: int) -> Ready:
        """Wait until `count` processes of `role` became ready over all; the last of these."""
        self._until(lambda: len(self.up[role]) >= count, f"{role} number {count}")
        return self.up[role][count - 1]

    def until_said(self, *places: str) -> None:
        """Wait until it serves and has stated where. Raises RunFailed."""
        self._until(lambda: self._places.keys() >= set(places), "the service")

    def totals(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """A metric's values as of now, by those of its labels, added up over the others."""
        with urllib.request.urlopen(self._places["metrics"], timeout=PATIENCE_S) as answer:
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
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> int | None:
        """Wait for its end; its exit code, None if it had to be killed."""
        try:
            code: int | None = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            code = None
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(PATIENCE_S)
        return code

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        with self._news:
            self._news.wait_for(lambda: is_so() or not self._num_open, timeout=PATIENCE_S)
        if not is_so():
            raise RunFailed(f"{what} did not become ready:\n" + "".join(self.log))

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            at_s = time.monotonic()
            with self._news:
                self.log.append(line)
                if found := _PLACE.match(line):
                    self._places[found[1]] = found[2]
                if found := _CHILD.search(line):
                    self.up[found[1]].append(Ready(pid=int(found[2]), at_s=at_s))
                self._news.notify_all()
        stream.close()
        with self._news:
            self._num_open -= 1
            self._news.notify_all()


@contextlib.contextmanager
def service(
    *options: str,
    num_fronts: int | None = 1,
    has_operations: bool = False,
    has_metrics: bool = False,
    environment: Mapping[str, str] | None = None,
    module: str = "penstock.tools",
) -> Generator[Service]:
    """One that serves, on all cores, with these options. `num_fronts` None: its default. Raises
    RunFailed when it does not come up."""
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
        found.until_said("ready", *(name for name, is_asked in extras if is_asked))
        yield found
    finally:
        if started.poll() is None:
            # The second one ends it at once, whatever still runs.
            started.send_signal(signal.SIGTERM)
            found.end()


def simulated(step_s: float, **settings: object) -> tuple[str, ...]:
    """Options for the simulated executor: every step takes the same, whatever it holds.

    `settings`: more fields of its configuration; they come before those made here.
    """
    prices = dict.fromkeys(("prefill_token_s", "decode_slot_s", "context_token_s"), 0.0)
    config = {"pace": "real_time", "cost": {"step_s": step_s, **prices}, **settings}
    return ("--executor", "simulated", "--simulated-config", json.dumps(config))


def capacity(num_streams: int, num_tokens: int) -> tuple[str, ...]:
    """Options that let so many streams of that length run at once. Two steps in flight: then one
    begins when the one before ends, whatever the engine does in between."""
    num_seqs = max(8, num_streams)
    return (
        *("--max-num-seqs", str(num_seqs), "--max-num-batched-tokens", str(max(8192, num_seqs))),
        *("--max-num-waiting", str(4 * num_seqs), "--max-seq-len", str(num_tokens + 96)),
        *("--block-size", "64", "--num-blocks", str(num_seqs * (num_tokens // 64 + 3))),
        # Slow steps on purpose would teach it that nothing can be done in time.
        *("--pipeline-depth", "2", "--deadline-admission", "off"),
    )


def request(num_tokens: int, num_prompt: int = 4) -> bytes:
    """A prompt of so many ids that generates so much, encoded."""
    return pb.GenerateRequest(
        token_prompt=prompt_pb2.TokenPrompt(ids=range(5, 5 + num_prompt)),
        sampling=options_pb2.SamplingOptions(temperature=0.0),
        stopping=options_pb2.StoppingOptions(max_tokens=num_tokens, ignore_eos=True),
    ).SerializeToString()


def run_client(
    role: str, options: dict[str, object], *, limit_s: float = PATIENCE_S
) -> dict[str, Any]:
    """What the load client found. Raises RunFailed when it failed, CannotBuild without it."""
    done = subprocess.run(
        client_command(role, options),
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s + 10.0,
    )
    if done.returncode != 0:
        raise RunFailed(done.stderr.strip() or f"the load client ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def client_command(role: str, options: dict[str, object]) -> list[str]:
    """The load client's; bytes are reported in hexadecimal. Raises CannotBuild without it."""
    listed = {f"--{name}": v.hex() if isinstance(v, bytes) else v for name, v in options.items()}
    words = [str(word) for pair in listed.items() for word in pair]
    return [str(native_build.load_client()), role, *words]


@contextlib.contextmanager
def process(*command: str) -> Generator[subprocess.Popen[str]]:
    """A child on all cores; asked to end, then ended."""
    os.sched_setaffinity(0, ALL_CORES)
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        if started.stdout is not None:
            started.stdout.close()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line of its stdout; RunFailed when none comes."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], PATIENCE_S)[0]:
        raise RunFailed(f"{process.args!r} did not say anything")
    return process.stdout.readline()


def expect_ready(process: subprocess.Popen[str]) -> None:
    """Wait until it states so on its stdout."""
    if line_of(process).strip() != "ready":
        time.sleep(0.1)  # its complaint is on the way to our stderr
        raise RunFailed(f"{process.args!r} did not start: exit code {process.poll()}")


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def machine_s() -> float:
    """Processor time that any client on the machine has used."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def pin(pids: list[int], cores: set[int]) -> None:
    """All threads of these processes to some cores."""
    for pid in pids:
        for thread in psutil.Process(pid).threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


def free_port() -> int:
    """A port that no client listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
