"""Locates TensorRT-LLM's builder, `trtllm-build`, lists its flags, runs it and terminates it.

The builder's output is passed to a callback as it arrives.
"""

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.conventions.extras import requires_extra
from penstock.executor.parent_death import die_with_parent

PROGRAM = "trtllm-build"
_HELP_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 10.0
_DRAIN_TIMEOUT_S = 2.0
_HEARTBEAT_S = 10.0
_NUM_KEPT_LINES = 20
_CHUNK_BYTES = 1 << 16
_FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)")


class BuilderUnusable(Exception):
    """The builder is missing, or its help cannot be read; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuilderEnd:
    """How a run of the builder ended: its exit code (negative: the number of the signal that ended
    it), its last non-empty lines of output (at most 20) and its duration.
    """

    exit_code: int
    last_lines: tuple[str, ...]
    duration_s: float


def find_builder() -> Path:
    """Return the path of the builder: next to the Python executable, else on PATH. Raises
    BuilderUnusable if there is none.
    """
    bin_folder = str(Path(sys.executable).parent)
    found = shutil.which(PROGRAM, path=bin_folder) or shutil.which(PROGRAM)
    if found is None:
        raise BuilderUnusable(
            f"the build of an engine {requires_extra('trtllm', PROGRAM)}, or run in NVIDIA's"
            " release container, or serve the Hugging Face model, which needs no build;"
            f" TensorRT-LLM has no {PROGRAM} since it retired the TensorRT backend"
        )
    return Path(found)


def known_flags(builder: Path) -> frozenset[str]:
    """Return the names of the flags in the output of `--help`, without the leading dashes. Raises
    BuilderUnusable if the help cannot be read.
    """
    try:
        answer = subprocess.run(
            [builder, "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_HELP_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuilderUnusable(f"{builder} --help cannot be run: {error}") from error
    if answer.returncode != 0:
        last = (answer.stderr or answer.stdout).strip().splitlines()[-1:] or ["no output"]
        raise BuilderUnusable(
            f"{builder} --help ended with exit code {answer.returncode}: {last[0]}"
        )
    flags = frozenset(_FLAG.findall(answer.stdout))
    if not flags:
        raise BuilderUnusable(f"{builder} --help lists no flags")
    return flags


def run_builder(
    command: Sequence[str],
    *,
    lock: int,
    on_start: Callable[[int], None],
    show: Callable[[bytes], None],
    on_heartbeat: Callable[[float], None],
    heartbeat_s: float = _HEARTBEAT_S,
) -> BuilderEnd:
    """Run the builder to its end. `show` receives its output (stdout and stderr), `on_start` its
    pid, `on_heartbeat` the seconds elapsed, every `heartbeat_s` seconds.

    `lock`: the descriptor of a locked file; the builder inherits it, so the lock is held until the
    builder has ended. An exception such as KeyboardInterrupt terminates the builder and its process
    group; when this process is killed, the kernel kills the builder (Linux). Raises OSError if it
    cannot be started. Call this function on the main thread: the kernel kills the builder when the
    calling thread ends.
    """
    started_s = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
        # A separate process group: the builder starts workers, which must all end with it.
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    try:
        on_start(process.pid)
        tail = _forward_output(
            process, show, lambda: on_heartbeat(time.monotonic() - started_s), heartbeat_s
        )
        exit_code = process.wait()
    finally:
        _end(process)
    return BuilderEnd(exit_code=exit_code, last_lines=tail, duration_s=time.monotonic() - started_s)


def _forward_output(
    process: "subprocess.Popen[bytes]",
    show: Callable[[bytes], None],
    on_heartbeat: Callable[[], None],
    heartbeat_s: float,
) -> tuple[str, ...]:
    """Pass the output to `show` until the pipe is closed, or the builder has ended and the pipe is
    idle for 2 s; return the last non-empty lines, at most 20.
    """
    assert process.stdout is not None
    tail: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
    partial = b""
    next_heartbeat_s = time.monotonic() + heartbeat_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            has_ended = process.poll() is not None
            left_s = max(0.0, next_heartbeat_s - time.monotonic())
            # A worker that outlives the builder may hold the pipe open.
            if selector.select(_DRAIN_TIMEOUT_S if has_ended else left_s):
                chunk = os.read(process.stdout.fileno(), _CHUNK_BYTES)
                if not chunk:
                    break
                show(chunk)
                *lines, partial = (partial + chunk).replace(b"\r", b"\n").split(b"\n")
                tail.extend(line.decode("utf-8", "replace") for line in lines if line.strip())
            elif has_ended:
                break
            if time.monotonic() >= next_heartbeat_s and not has_ended:
                on_heartbeat()
                next_heartbeat_s = time.monotonic() + heartbeat_s
    if partial.strip():
        tail.append(partial.decode("utf-8", "replace"))
    return tuple(tail)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Close the pipe; if the builder still runs, end its process group with SIGTERM and, after 10
    s, SIGKILL.
    """
    if process.stdout is not None:
        process.stdout.close()
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait(_STOP_TIMEOUT_S)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
