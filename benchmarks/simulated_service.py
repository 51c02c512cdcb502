"""A service on the simulated executor, the load client, and the processes they run in.

Shared by the benchmarks of delivery, connections and memory. Everything is on 127.0.0.1 and ends
with the block that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from typing import Any

import psutil

import native_build
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import options_pb2, prompt_pb2

PATIENCE_S = 30.0
ALL_CORES = os.sched_getaffinity(0)
_READY = re.compile(r"penstock ready on \S+:(\d+) ")


class RunFailed(Exception):
    """Something could not be measured; the message is what its processes said."""


@contextlib.contextmanager
def service(*options: str, num_fronts: int) -> Generator[tuple[int, list[int], int]]:
    """Port, front and engine process ids of a fresh service on the simulated executor."""
    command = (sys.executable, "-m", "penstock.tools", "serve", "--executor", "simulated")
    common = ("--port", "0", "--drain-grace-s", "0.1", "--log-level", "error")
    unseen = ("--operations-port", "off", "--metrics-port", "off")
    with process(*command, *common, *unseen, "--fronts", str(num_fronts), *options) as started:
        ready = _READY.match(line_of(started))
        if ready is None:
            raise RunFailed("the service did not start")
        fronts, engines = [], []
        for child in psutil.Process(started.pid).children():
            line = " ".join(child.cmdline())
            if "front_process" in line:
                fronts.append(child.pid)
            elif "engine_process" in line:
                engines.append(child.pid)
        yield int(ready[1]), fronts, engines[0]


def request(num_tokens: int) -> str:
    """A short prompt that generates so much, encoded, in hexadecimal."""
    message = pb.GenerateRequest(
        token_prompt=prompt_pb2.TokenPrompt(ids=[5, 6, 7, 8]),
        sampling=options_pb2.SamplingOptions(temperature=0.0),
        stopping=options_pb2.StoppingOptions(max_tokens=num_tokens, ignore_eos=True),
    )
    return message.SerializeToString().hex()


def simulated(step_s: float, faults: list[dict[str, object]] | None = None) -> str:
    """Settings of the simulated executor: every step takes the same, whatever it holds."""
    prices = dict.fromkeys(("prefill_token_s", "decode_slot_s", "context_token_s"), 0.0)
    return json.dumps({"cost": {"step_s": step_s, **prices}, "faults": faults or []})


def capacity(num_streams: int, num_tokens: int) -> tuple[str, ...]:
    """Options that let so many streams of that length run at once. Two steps in flight: then one
    begins when the one before ends, whatever the engine does in between."""
    num_seqs = max(8, num_streams)
    return (
        *("--max-num-seqs", str(num_seqs), "--max-num-batched-tokens", str(max(8192, num_seqs))),
        *("--max-num-waiting", str(4 * num_seqs), "--max-seq-len", str(num_tokens + 96)),
        *("--block-size", "64", "--num-blocks", str(num_seqs * (num_tokens // 64 + 3))),
        # Slow steps on purpose would teach it that nothing can be done in time.
        *("--pipeline-depth", "2", "--foresee-deadlines", "off"),
    )


def run_client(
    role: str, options: dict[str, object], *, limit_s: float = 2 * PATIENCE_S
) -> dict[str, Any]:
    """What the load client found. Raises RunFailed when it failed, CannotBuild without it."""
    listed = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(
        [str(native_build.load_client()), role, *listed],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s + 10.0,
    )
    if done.returncode != 0:
        raise RunFailed(done.stderr.strip() or f"the load client ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


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
    """Wait until it says so on its stdout."""
    if line_of(process).strip() != "ready":
        time.sleep(0.1)  # its complaint is on the way to our stderr
        raise RunFailed(f"{process.args!r} did not start: exit code {process.poll()}")


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
