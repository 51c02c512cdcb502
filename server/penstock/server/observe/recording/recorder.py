"""Records the requests and the step times of a serving engine in files, without delaying it.

Owns the path from the engine's thread to the files: the engine appends to a list, in a microsecond,
and a separate thread writes lines about once a second. A failure is logged once and ends the
recording, not the service. Files have whole lines, mode 0600 and bounded size.
"""

import json
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
from penstock.scheduler.events import Failed, Finished, StepEvents
from penstock.scheduler.launched_step import Chunk
from penstock.scheduler.listener import StepNote
from penstock.scheduler.request import RequestSpec
from penstock.server.observe.recording.request_log import RequestLog
from penstock.server.observe.recording.trace import recorded_line

_MAX_NUM_PAIRS = 100_000


class RecordFile:
    """A new file at `path`, mode 0600. Raises OSError (FileExistsError) if it cannot be created."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        # O_EXCL: never an existing file, nor the target of a symbolic link.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self.path = path
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.is_full = False

    def write(self, lines: Sequence[str]) -> None:
        """Append lines; at the first one that does not fit, `is_full` is set and writing ends.

        Raises OSError if the disk rejects them; the file still ends with a whole line.
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
        """Finish the file. Idempotent."""
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
    """Open new files `<name>.jsonl`, or `<name>-2.jsonl` and so on, both of the first free number.

    `folder` is created, for its owner only, if it is missing. Raises OSError.
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


DEFAULT_MAX_BYTES = 256 * 1024 * 1024
_NAMES = ("steps", "requests")
_INTERVAL_S = 1.0
_MAX_BACKLOG = 200_000
_CLOSE_S = 2.0
_SECRET_BYTES = 32

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Turn:
    """One engine iteration: keys of new tokens (int64 [m]), ended requests, the timed step."""

    keys: NDArray[np.int64]
    ends: tuple[Finished | Failed, ...]
    measure: StepMeasure | None


class Recorder:
    """Writes two files in a folder: `steps.jsonl` and `requests.jsonl`, numbered where they exist.

    An `EngineListener`. `max_bytes` bounds each file. The engine times a step from launch to
    collection. The service's work between two steps (results, frames to and from the fronts) delays
    the next step just as much, so a recorded step lasts from the end of the previous one to its own
    end. Steps of a self-paced executor have no duration and are omitted. Raises OSError if the
    files cannot be created.
    """

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int,
        is_self_paced: bool = False,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_backlog: int = _MAX_BACKLOG,
    ) -> None:
        self._steps, self._requests = open_pair(folder, _NAMES, max_bytes)
        self._log = RequestLog(block_size=block_size, secret=os.urandom(_SECRET_BYTES))
        self._is_self_paced = is_self_paced
        # When the last step ended, and whether the next one was due at once.
        self._ended_s, self._was_busy = -math.inf, False
        self._max_backlog = max_backlog
        self._inbox: deque[_Turn | tuple[RequestSpec, ...]] = deque()
        self._is_recording = True
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_recording(self) -> bool:
        """False after it was closed or failed."""
        return self._is_recording

    def start(self) -> None:
        """Start writing, on a separate thread."""
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()
        log.info("recording to %s and %s", self._steps.path, self._requests.path)

    def note_submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """See `EngineListener`."""
        self._put(specs)

    def note_launch(self, batch: Batch, chunks: Sequence[Chunk], launched_s: float) -> None:
        """See `EngineListener`."""

    def note_turn(self, events: StepEvents, note: StepNote | None) -> None:
        """See `EngineListener`."""
        self._put(_Turn(keys=events.keys, ends=events.ends, measure=self._measure(note)))

    def close(self) -> None:
        """Write the remaining lines and close the files; limited in time, in case the disk
        hangs.
        """
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                self._is_recording = False
                log.warning("recording truncated: no response from %s", self._steps.path.parent)
                return
        if self._is_recording:
            self.drain()
            self._is_recording = False
            log.info(
                "recorded; omitted: %d requests without output, %d that had not ended",
                self._log.num_left_out,
                self._log.num_live,
            )
        self._steps.close()
        self._requests.close()

    def drain(self) -> None:
        """Write everything noted so far."""
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
            seconds=note.updated_s - begun_s,
        )

    def _put(self, item: _Turn | tuple[RequestSpec, ...]) -> None:
        if not self._is_recording:
            return
        if len(self._inbox) >= self._max_backlog:
            self._stop(f"{self._steps.path.parent} is too slow")
            return
        self._inbox.append(item)

    def _stop(self, reason: str) -> None:
        # The queued items are kept: the other thread may be reading them.
        self._is_recording = False
        log.warning("recording stopped: %s", reason)

    def _run(self) -> None:
        try:
            while not self._ended.wait(_INTERVAL_S) and self._is_recording:
                self.drain()
        except Exception:
            # A bug here must not look like a bug of the engine.
            log.exception("recording failed")
            self._stop("see above")

    def _lines(self) -> tuple[list[str], list[str]]:
        steps: list[str] = []
        for _ in range(len(self._inbox)):
            item = self._inbox.popleft()
            if isinstance(item, _Turn):
                if item.measure is not None:
                    steps.append(step_line(item.measure))
                self._log.tokens(item.keys)
                for end in item.ends:
                    self._log.end(end)
            else:
                self._log.submit(item)
        return steps, [recorded_line(request) for request in self._log.take()]

    def _write(self, steps: list[str], requests: list[str]) -> None:
        for file, lines in ((self._steps, steps), (self._requests, requests)):
            was_full = file.is_full
            file.write(lines)
            if file.is_full and not was_full:
                log.warning("%s is full: nothing more is written there", file.path)
        if _are_full(self._steps, self._requests):
            self._stop("both files are full")


def step_line(measure: StepMeasure) -> str:
    """Return a step in the format of `penstock simulate --calibrate-from`, without a newline."""
    return json.dumps(
        {
            "n_prefill": measure.num_prefill_tokens,
            "n_decode": measure.num_decodes,
            "n_context": measure.num_context_tokens,
            "seconds": round(measure.seconds, 9),
        }
    )


def _are_full(*files: RecordFile) -> bool:
    return all(file.is_full for file in files)
