"""A sampling profiler of this process's threads; writes a speedscope file.

A sample has names of functions and files and line numbers, never values. Blocks only its own
thread; sampling holds the interpreter lock for some tens of microseconds a sample.

The format: https://www.speedscope.app/file-format-schema.json
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

MAX_SECONDS = 60.0
RATE_HZ = 100.0
_MAX_DEPTH = 200
_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


@dataclass(slots=True)
class _Track:
    """One thread. Equal samples in a row are merged, their weights added up."""

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
    """Every frame that was seen, once."""

    def __init__(self) -> None:
        self._indices: dict[tuple[str, str, int], int] = {}

    def stack_of(self, frame: FrameType | None) -> tuple[int, ...]:
        """The indices of a stack, outermost first; its innermost part where it is too deep."""
        places: list[int] = []
        while frame is not None and len(places) < _MAX_DEPTH:
            code = frame.f_code
            place = (code.co_qualname, code.co_filename, frame.f_lineno or code.co_firstlineno)
            places.append(self._indices.setdefault(place, len(self._indices)))
            frame = frame.f_back
        places.reverse()
        return tuple(places)

    def listed(self) -> list[dict[str, Any]]:
        """The frames in the file's form, by index."""
        return [{"name": name, "file": file, "line": line} for name, file, line in self._indices]


def sample(
    process: str,
    seconds: float,
    *,
    wait: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """Sample every other thread of this process RATE_HZ times a second; returns a speedscope file.

    Blocks for `seconds`, above 0 and at most MAX_SECONDS. Raises ValueError naming them.
    """
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"seconds must be above 0 and at most {MAX_SECONDS:g}, not {seconds:g}")
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
