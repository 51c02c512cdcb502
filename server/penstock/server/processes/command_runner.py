"""Executes an operator's commands in this process: sets the log level, or samples the stacks.

A sample contains function names, file names and line numbers, never values. Taking it holds the GIL
for some tens of microseconds. The profile is a speedscope file
(https://www.speedscope.app/file-format-schema.json). The caller passes the function that sends the
response.
"""

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from penstock.server.ipc.control_frames import SetLogLevel
from penstock.server.ipc.frames import MAX_PROFILE_S, Command, CommandResult, Profile
from penstock.server.observe.logs import set_log_level

logger = logging.getLogger(__name__)
RATE_HZ = 100.0
_MAX_DEPTH = 200
_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


class CommandRunner:
    """Executes commands in this process. `process` is the name of the process in results."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._sampling = threading.Lock()

    def execute(self, command: Command, answer: Callable[[CommandResult], None]) -> None:
        """Start a command. `answer` is called once with the result or the error, on this or another
        thread."""
        try:
            match command.action:
                case SetLogLevel(level=level):
                    set_log_level(level)
                    logger.info("log level is %s", level)
                    answer(CommandResult(ticket=command.ticket))
                case Profile(seconds=seconds):
                    self._profile(command.ticket, seconds, answer)
        except ValueError as error:
            answer(CommandResult(ticket=command.ticket, problem=str(error)))

    def _profile(
        self, ticket: int, seconds: float, answer: Callable[[CommandResult], None]
    ) -> None:
        if not self._sampling.acquire(blocking=False):
            raise ValueError(f"{self._process} is being sampled already")

        def work() -> None:
            try:
                done = CommandResult(ticket=ticket, payload=sample(self._process, seconds))
            except ValueError as error:
                done = CommandResult(ticket=ticket, problem=str(error))
            finally:
                self._sampling.release()
            # The event loop of the receiver may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                answer(done)

        logger.info("sampling for %g s", seconds)
        threading.Thread(target=work, name="sampler", daemon=True).start()


@dataclass(slots=True)
class _Track:
    """The samples of one thread. Equal consecutive samples are merged, and their weights (in
    seconds) are added."""

    name: str
    samples: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    weights: list[float] = field(default_factory=list[float])

    def add(self, stack: tuple[int, ...], seconds: float) -> None:
        if self.samples and self.samples[-1] == stack:
            self.weights[-1] += seconds
        else:
            self.samples.append(stack)
            self.weights.append(seconds)


class _Frames:
    """All distinct stack frames of the samples."""

    def __init__(self) -> None:
        self._indices: dict[tuple[str, str, int], int] = {}

    def stack_of(self, frame: FrameType | None) -> tuple[int, ...]:
        """Return the indices of the frames of a stack, outermost first.

        If a stack has more than `_MAX_DEPTH` frames, only the innermost `_MAX_DEPTH` are returned.
        """
        places: list[int] = []
        while frame is not None and len(places) < _MAX_DEPTH:
            code = frame.f_code
            place = (code.co_qualname, code.co_filename, frame.f_lineno or code.co_firstlineno)
            places.append(self._indices.setdefault(place, len(self._indices)))
            frame = frame.f_back
        places.reverse()
        return tuple(places)

    def listed(self) -> list[dict[str, Any]]:
        """Return all frames, ordered by index, as objects of a speedscope file."""
        return [{"name": name, "file": file, "line": line} for name, file, line in self._indices]


def sample(
    process: str,
    seconds: float,
    *,
    wait: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """Sample all other threads of this process at about RATE_HZ and return a speedscope file.

    Blocks for `seconds`. Raises ValueError unless `seconds` is above 0 and at most MAX_PROFILE_S.
    """
    if not 0 < seconds <= MAX_PROFILE_S:
        raise ValueError(f"seconds must be above 0 and at most {MAX_PROFILE_S:g}, not {seconds:g}")
    frames, tracks = _Frames(), dict[int, _Track]()
    began_s = last_s = clock()
    while last_s - began_s < seconds:
        wait(1 / RATE_HZ)
        now_s = clock()
        _sample_threads(frames, tracks, now_s - last_s)
        last_s = now_s
    return _speedscope(process, frames, list(tracks.values()))


def _sample_threads(frames: _Frames, tracks: dict[int, _Track], seconds: float) -> None:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    # The documented way to inspect other threads, despite its private name.
    current_frames = sys._current_frames  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    for ident, frame in current_frames().items():
        if ident == here:
            continue
        track = tracks.get(ident)
        if track is None:
            # A thread that native code started has no Python name.
            track = tracks[ident] = _Track(names.get(ident, f"thread {ident}"))
        track.add(frames.stack_of(frame), seconds)


def _speedscope(process: str, frames: _Frames, tracks: list[_Track]) -> bytes:
    profiles = [
        {
            "type": "sampled",
            "name": f"{process}: {track.name}",
            "unit": "seconds",
            "startValue": 0,
            "endValue": round(sum(track.weights), 6),
            "samples": track.samples,
            "weights": [round(weight, 6) for weight in track.weights],
        }
        for track in tracks
    ]
    document = {
        "$schema": _SCHEMA,
        "exporter": "penstock",
        "name": process,
        "activeProfileIndex": 0,
        "shared": {"frames": frames.listed()},
        "profiles": profiles,
    }
    return json.dumps(document, separators=(",", ":")).encode()
