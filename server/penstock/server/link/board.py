"""What an engine and its fronts show without being asked: small shared memories, read by anyone.

Owns two layouts of whole 8-byte words. The engine's board: a heartbeat, the state of its queue, how
busy it is and who is in the step under way, so that a dead engine can still be asked who was with
it. The fronts' beats: one heartbeat per row. Whoever holds the descriptor has the memory; it
outlives its writers. Does not know who judges what it reads there. Takes no numpy along: the
supervisor reads it.
"""

import math
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_WORD_BYTES = 8
_MAGIC = int.from_bytes(b"pnstkbd1", "little")

# Words of the engine's board.
_MAGIC_AT, _MAX_KEYS, _EPOCH, _NUM_BEATS, _BEAT_NS = range(5)
_NUM_WAITING, _NUM_WAITING_TOKENS, _QUEUE_S, _NUM_ON_TRIAL, _KEY_AT_DOOR = range(5, 10)
_BANK_SIZES = 10
_NUM_BANKS = 2
"""Steps that may be under way at once, each with its own keys."""
_NUM_RUNNING, _NUM_USED_BLOCKS, _NUM_OUTPUT_TOKENS = range(12, 15)
_NUM_SHORTENED_RETENTIONS, _NUM_DROPPED_BLOCKS = range(15, 17)
_TRIAL_KEYS, _MAX_ON_TRIAL = 17, 64
_KEYS = _TRIAL_KEYS + _MAX_ON_TRIAL

_ROW_WORDS = 4
_ROW_OWNER, _ROW_BEATS, _ROW_NS = range(3)


class BoardError(Exception):
    """A descriptor holds no board."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """An engine's queue as it stood after its last turn.

    `num_waiting_tokens`: of their prompts. `estimated_queue_s`: how long one that came now would
    probably wait, seconds; None where nothing is known of the machine's pace. `at_s`: when that
    was, on the monotonic clock; 0 before an engine's first turn.
    """

    epoch: int
    num_waiting: int
    num_waiting_tokens: int
    estimated_queue_s: float | None
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """How busy an engine was after its last turn.

    `num_used_blocks`: of the KV cache, without those that are only kept for reuse.
    `num_output_tokens`: made since the engine started; as of then too, `num_shortened_retentions`
    and `num_dropped_blocks`: see `RetentionCuts`.
    """

    epoch: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_used_blocks: int
    num_output_tokens: int
    num_shortened_retentions: int = 0
    num_dropped_blocks: int = 0


def create_board(max_num_keys: int) -> int:
    """A new engine's board with room for so many keys in a step; its file descriptor.

    Not inherited unless it is handed on. Raises OSError when there is no memory for it.
    """
    num_words = _KEYS + _NUM_BANKS * max_num_keys
    fd = _nameless_file("penstock-board", num_words * _WORD_BYTES)
    os.pwrite(fd, struct.pack("<QQ", _MAGIC, max_num_keys), 0)
    return fd


def create_beats(num_rows: int) -> int:
    """A new memory for the heartbeats of so many fronts; its file descriptor. Raises OSError."""
    return _nameless_file("penstock-beats", num_rows * _ROW_WORDS * _WORD_BYTES)


class EngineBoard:
    """The writing side, for the one engine that lives. What an earlier engine wrote is gone.

    `num_steps`: how many may be under way at once, 1 or 2. The descriptor may be closed then.
    Raises BoardError, OSError.
    """

    def __init__(self, fd: int, epoch: int, num_steps: int = 1) -> None:
        self._map, self._words = _map_words(fd)
        self._floats = memoryview(self._map).cast("d")
        self._max_keys = _max_keys_of(self._words)
        words = self._words
        for word in range(_NUM_BEATS, _KEYS):
            words[word] = 0
        self._floats[_QUEUE_S] = math.nan
        words[_EPOCH] = epoch
        self._num_banks = min(num_steps, _NUM_BANKS)
        self._bank = 0

    def beat(self) -> None:
        """The loop has come round once more: it is not stuck."""
        words = self._words
        words[_NUM_BEATS] += 1
        words[_BEAT_NS] = time.monotonic_ns()

    def show_queue(
        self, num_waiting: int, num_waiting_tokens: int, estimated_queue_s: float | None
    ) -> None:
        """How the queue stands, for fronts that want to refuse by themselves."""
        words = self._words
        words[_NUM_WAITING] = num_waiting
        words[_NUM_WAITING_TOKENS] = num_waiting_tokens
        self._floats[_QUEUE_S] = math.nan if estimated_queue_s is None else estimated_queue_s

    def show_load(self, num_running: int, num_used_blocks: int, num_output_tokens: int) -> None:
        """How busy the engine is, for whoever chooses between several."""
        words = self._words
        words[_NUM_RUNNING] = num_running
        words[_NUM_USED_BLOCKS] = num_used_blocks
        words[_NUM_OUTPUT_TOKENS] = num_output_tokens

    def show_retention_cuts(self, num_shortened: int, num_dropped_blocks: int) -> None:
        """What the budget of retention has cut."""
        words = self._words
        words[_NUM_SHORTENED_RETENTIONS] = num_shortened
        words[_NUM_DROPPED_BLOCKS] = num_dropped_blocks

    def step_begins(self, keys: "NDArray[np.int64]") -> None:
        """The executor is about to get a step with these keys, int64 [n]."""
        words, bank = self._words, self._bank
        keys = keys[: self._max_keys]
        # Killed in between, the step has not begun: then nobody was in it.
        words[_BANK_SIZES + bank] = 0
        start = (_KEYS + bank * self._max_keys) * _WORD_BYTES
        self._map[start : start + len(keys) * _WORD_BYTES] = keys.tobytes()
        words[_BANK_SIZES + bank] = len(keys)
        self._bank = (bank + 1) % self._num_banks

    def no_step(self) -> None:
        """Nothing is under way any more. Until then the last steps count as if they were.

        What their results set off is still their doing.
        """
        for bank in range(_NUM_BANKS):
            self._words[_BANK_SIZES + bank] = 0

    def mark_probation(self, keys: Sequence[int]) -> None:
        """The outputs of the suspect that is being tried; none: nobody is."""
        words = self._words
        words[_NUM_ON_TRIAL] = 0
        for place, key in enumerate(keys[:_MAX_ON_TRIAL]):
            words[_TRIAL_KEYS + place] = key
        words[_NUM_ON_TRIAL] = min(len(keys), _MAX_ON_TRIAL)

    def mark_submitting(self, key: int) -> None:
        """The leader of the request that is being taken in right now; 0: none."""
        self._words[_KEY_AT_DOOR] = key

    def close(self) -> None:
        """Unmap; what was written stays. Idempotent."""
        for view in (self._words, self._floats):
            view.release()
        self._map.close()


class BoardView:
    """The reading side; the descriptor may be closed then. Raises BoardError, OSError.

    Words are written one by one: each is whole, two may be of different turns.
    """

    def __init__(self, fd: int) -> None:
        self._map, self._words = _map_words(fd, is_writer=False)
        self._floats = memoryview(self._map).cast("d")
        self._max_keys = _max_keys_of(self._words)

    @property
    def epoch(self) -> int:
        """Of the engine that wrote here last; 0 before the first."""
        return self._words[_EPOCH]

    @property
    def num_beats(self) -> int:
        """How often the engine's loop has come round; 0 while it starts."""
        return self._words[_NUM_BEATS]

    @property
    def queue(self) -> QueueState:
        """The queue as its engine showed it last."""
        words, queue_s = self._words, self._floats[_QUEUE_S]
        return QueueState(
            epoch=words[_EPOCH],
            num_waiting=words[_NUM_WAITING],
            num_waiting_tokens=words[_NUM_WAITING_TOKENS],
            estimated_queue_s=None if math.isnan(queue_s) else queue_s,
            at_s=words[_BEAT_NS] / 1e9,
        )

    @property
    def load(self) -> LoadState:
        """The load as its engine showed it last."""
        words = self._words
        return LoadState(
            epoch=words[_EPOCH],
            num_running=words[_NUM_RUNNING],
            num_waiting=words[_NUM_WAITING],
            num_waiting_tokens=words[_NUM_WAITING_TOKENS],
            num_used_blocks=words[_NUM_USED_BLOCKS],
            num_output_tokens=words[_NUM_OUTPUT_TOKENS],
            num_shortened_retentions=words[_NUM_SHORTENED_RETENTIONS],
            num_dropped_blocks=words[_NUM_DROPPED_BLOCKS],
        )

    def keys_on_probation(self) -> frozenset[int]:
        """The outputs of the suspect that was being tried; empty when none was."""
        num_keys = min(self._words[_NUM_ON_TRIAL], _MAX_ON_TRIAL)
        return frozenset(self._words[_TRIAL_KEYS : _TRIAL_KEYS + num_keys])

    def keys_in_progress(self) -> frozenset[int]:
        """Who was in the last steps, until they were done with, and who was being taken in."""
        keys: set[int] = set()
        for bank in range(_NUM_BANKS):
            first = _KEYS + bank * self._max_keys
            num_keys = min(self._words[_BANK_SIZES + bank], self._max_keys)
            keys.update(self._words[first : first + num_keys])
        keys.add(self._words[_KEY_AT_DOOR])
        keys.discard(0)
        return frozenset(keys)

    def close(self) -> None:
        """Unmap. Idempotent."""
        for view in (self._words, self._floats):
            view.release()
        self._map.close()


class FrontBeat:
    """The writing side of one row, for the front that owns it. Raises BoardError, OSError."""

    def __init__(self, fd: int, row: int, front_id: int) -> None:
        self._map, self._words = _map_words(fd)
        self._first = row * _ROW_WORDS
        if not 0 <= self._first < len(self._words):
            raise BoardError(f"there is no row {row}")
        self._words[self._first + _ROW_BEATS] = 0
        self._words[self._first + _ROW_OWNER] = front_id

    def beat(self) -> None:
        """The event loop has come round once more: it is not stuck."""
        words, first = self._words, self._first
        words[first + _ROW_BEATS] += 1
        words[first + _ROW_NS] = time.monotonic_ns()

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._words.release()
        self._map.close()


class BeatsView:
    """The reading side of all rows. Raises BoardError, OSError."""

    def __init__(self, fd: int) -> None:
        self._map, self._words = _map_words(fd, is_writer=False)

    def num_beats(self, row: int, front_id: int) -> int:
        """How often that front's loop has come round; 0 while it is not in that row."""
        first = row * _ROW_WORDS
        if self._words[first + _ROW_OWNER] != front_id:
            return 0
        return self._words[first + _ROW_BEATS]

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._words.release()
        self._map.close()


def _map_words(fd: int, *, is_writer: bool = True) -> tuple[mmap.mmap, "memoryview[int]"]:
    num_bytes = os.fstat(fd).st_size
    if not num_bytes or num_bytes % _WORD_BYTES:
        raise BoardError(f"{num_bytes} bytes are no board")
    access = mmap.ACCESS_WRITE if is_writer else mmap.ACCESS_READ
    mapped = mmap.mmap(fd, num_bytes, access=access)
    return mapped, memoryview(mapped).cast("Q")


def _max_keys_of(words: "memoryview[int]") -> int:
    if len(words) < _KEYS or words[_MAGIC_AT] != _MAGIC:
        raise BoardError("what is there is no engine's board")
    return words[_MAX_KEYS]


def _nameless_file(name: str, num_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        # Not Linux: a file that nobody finds, in memory where the system keeps such files there.
        fd, path = tempfile.mkstemp(prefix=f"{name}-")
        Path(path).unlink()
    os.ftruncate(fd, num_bytes)
    return fd
