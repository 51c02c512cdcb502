"""Records the requests and the step durations of a serving engine in files, without delaying it.

The engine's thread appends to a list, and a separate thread writes lines about once per second. A
failure is logged once and ends the recording, not the service. Files contain only complete lines,
have mode 0600, and are limited in size.
"""

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import Batch
from penstock.scheduler.cost_model import StepMeasure
from penstock.scheduler.events import Completed, Failed, StepEvents
from penstock.scheduler.launched_step import PrefillChunk
from penstock.scheduler.listener import StepNote
from penstock.scheduler.request import RequestSpec
from penstock.server.observe.config import DEFAULT_MAX_RECORD_BYTES
from penstock.server.observe.recording.request_log import RequestLog
from penstock.server.observe.recording.trace import json_line

_MAX_NUM_PAIRS = 100_000


class RecordFile:
    """A new file at `path` with mode 0600 and at most `max_bytes` bytes. Raises FileExistsError, or
    another OSError if it cannot be created."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        # O_EXCL: never open an existing file or the target of a symbolic link.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self.path = path
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.is_full = False

    def write(self, lines: Sequence[str]) -> None:
        """Append lines. If a line would exceed the size limit, set `is_full` and write neither that
        line nor any later one.

        Raises OSError if writing fails; the file then still ends with a complete line.
        """
        taken: list[bytes] = []
        room = self._max_bytes - self._num_bytes
        for line in lines:
            data = line.encode() + b"\n"
            if self.is_full or len(data) > room:
                self.is_full = True
                break
            room -= len(data)
            taken.append(data)
        if taken:
            self._append(b"".join(taken))

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            written = data[: len(data) - len(rest)]
            self._num_bytes += written.rfind(b"\n") + 1
            os.ftruncate(self._fd, self._num_bytes)
            raise
        self._num_bytes += len(data)


def open_pair(
    folder: Path, names: tuple[str, str], max_bytes: int
) -> tuple[RecordFile, RecordFile]:
    """Create two files, named `<name>.jsonl` for each of `names`. If one of them exists, both get
    the same number: `<name>-2.jsonl`, and so on.

    Creates `folder`, accessible to its owner only, if it is missing. Raises OSError if a file or
    the folder cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in range(1, _MAX_NUM_PAIRS):
        suffix = "" if number == 1 else f"-{number}"
        paths = [folder / f"{name}{suffix}.jsonl" for name in names]
        if any(os.path.lexists(path) for path in paths):
            continue
        first = RecordFile(paths[0], max_bytes)
        try:
            return first, RecordFile(paths[1], max_bytes)
        except OSError:
            first.close()
            paths[0].unlink()
            raise
    raise FileExistsError(f"{folder} contains {_MAX_NUM_PAIRS} recordings already")


_NAMES = ("steps", "requests")
_INTERVAL_S = 1.0
_MAX_BACKLOG = 200_000
_CLOSE_S = 2.0
_SECRET_BYTES = 32

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Iteration:
    """One engine iteration. `keys` (int64 [n]) has for each new token the key of its output. `ends`
    are the ended outputs. `measure` is the step with its duration, None if no step is recorded."""

    keys: NDArray[np.int64]
    ends: tuple[Completed | Failed, ...]
    measure: StepMeasure | None


class Recorder:
    """An `EngineListener` that writes `steps.jsonl` and `requests.jsonl` to a folder, or numbered
    files such as `steps-2.jsonl` if they exist already.

    The recorded duration of a step begins at the end of the previous step, because the work between
    two steps delays the next step too. If the engine was idle, it begins at the start of the step.
    If `is_self_paced`, the executor schedules its own batches: its steps have no duration and are
    left out. `max_bytes` limits the size of each file. Recording stops if more than `max_backlog`
    items would be unwritten. Raises OSError if the files cannot be created.
    """

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int,
        is_self_paced: bool = False,
        max_bytes: int = DEFAULT_MAX_RECORD_BYTES,
        max_backlog: int = _MAX_BACKLOG,
    ) -> None:
        self._steps, self._requests = open_pair(folder, _NAMES, max_bytes)
        self._log = RequestLog(block_size=block_size, secret=os.urandom(_SECRET_BYTES))
        self._is_self_paced = is_self_paced
        # The end of the last step, and whether the next step could start at once.
        self._ended_s, self._was_busy = -math.inf, False
        self._max_backlog = max_backlog
        self._inbox: deque[_Iteration | tuple[RequestSpec, ...]] = deque()
        self._is_recording = True
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_recording(self) -> bool:
        """False after `close`, after a failure, or when both files are full."""
        return self._is_recording

    def start(self) -> None:
        """Start the thread that writes the files."""
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()
        logger.info("recording to %s and %s", self._steps.path, self._requests.path)

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Queue the specs of a submitted request for the writing thread."""
        self._put(specs)

    def note_launch(self, batch: Batch, chunks: Sequence[PrefillChunk], launched_s: float) -> None:
        """Do nothing: a step is recorded after its result."""

    def note_iteration(self, events: StepEvents, note: StepNote | None) -> None:
        """Queue the tokens, ended outputs and step of an iteration for the writing thread."""
        self._put(_Iteration(keys=events.keys, ends=events.ends, measure=self._measure(note)))

    def close(self) -> None:
        """Write the remaining lines and close the files. If the writing thread does not end within
        `_CLOSE_S`, because the disk hangs, the remaining lines are lost and the files stay open."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                self._is_recording = False
                logger.warning("recording truncated: no response from %s", self._steps.path.parent)
                return
        if self._is_recording:
            self.drain()
            self._is_recording = False
            logger.info(
                "recorded; omitted: %d requests without output, %d that had not ended",
                self._log.num_left_out,
                self._log.num_live,
            )
        self._steps.close()
        self._requests.close()

    def drain(self) -> None:
        """Write all queued items to the files. Stops the recording if that fails."""
        try:
            self._write(*self._lines())
        except OSError as error:
            self._stop(f"{error}")

    def _measure(self, note: StepNote | None) -> StepMeasure | None:
        ended_s, was_busy = self._ended_s, self._was_busy
        self._was_busy = note is not None and bool(note.num_running or note.num_waiting)
        if note is None or self._is_self_paced:
            return None
        self._ended_s = note.updated_s
        # With two steps in flight, a step begins before the previous one ends.
        begun_s = ended_s if was_busy else max(ended_s, note.begun_s)
        return StepMeasure(
            num_prefill_tokens=note.num_prefill_tokens,
            num_decodes=note.batch.num_decodes,
            num_context_tokens=note.num_context_tokens,
            seconds=round(note.updated_s - begun_s, 9),
        )

    def _put(self, item: _Iteration | tuple[RequestSpec, ...]) -> None:
        if not self._is_recording:
            return
        if len(self._inbox) >= self._max_backlog:
            self._stop(f"{self._steps.path.parent} is too slow")
            return
        self._inbox.append(item)

    def _stop(self, reason: str) -> None:
        # The queued items stay, because the other thread may be reading them.
        self._is_recording = False
        logger.warning("recording stopped: %s", reason)

    def _run(self) -> None:
        try:
            while not self._ended.wait(_INTERVAL_S) and self._is_recording:
                self.drain()
        except Exception:
            # An error here must not look like an error of the engine.
            logger.exception("recording failed")
            self._stop("see above")

    def _lines(self) -> tuple[list[str], list[str]]:
        steps: list[str] = []
        for _ in range(len(self._inbox)):
            item = self._inbox.popleft()
            if isinstance(item, _Iteration):
                if item.measure is not None:
                    steps.append(json_line(item.measure))
                self._log.add_tokens(item.keys)
                for end in item.ends:
                    self._log.end(end)
            else:
                self._log.add(item)
        return steps, [json_line(request) for request in self._log.take()]

    def _write(self, steps: list[str], requests: list[str]) -> None:
        for file, lines in ((self._steps, steps), (self._requests, requests)):
            was_full = file.is_full
            file.write(lines)
            if file.is_full and not was_full:
                logger.warning("%s has reached its size limit; recording stopped", file.path)
        if _are_full(self._steps, self._requests):
            self._stop("both files are full")


def _are_full(*files: RecordFile) -> bool:
    return all(file.is_full for file in files)
