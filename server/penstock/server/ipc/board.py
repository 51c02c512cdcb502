"""Status boards in shared memory: written by the engine and the fronts (gRPC server processes),
read by other processes.

Defines two layouts of 8-byte words. The engine's board has a heartbeat, the state of the queue, the
load, and the keys of the outputs that are in the steps in flight, on probation, or being submitted.
The fronts' board has the heartbeat of one front per row. The memory belongs to a file descriptor
and remains readable when the process that wrote it crashes. Does not import numpy, because the
supervisor uses this module.
"""

import math
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.server.ipc.anonymous_file import anonymous_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_WORD_BYTES = 8
_MAGIC = int.from_bytes(b"pnstkbd1", "little")

# Word offsets of the fields of the engine's board.
_MAGIC_AT, _MAX_KEYS, _EPOCH, _NUM_HEARTBEATS, _HEARTBEAT_NS = range(5)
_NUM_WAITING, _NUM_WAITING_TOKENS, _QUEUE_S, _NUM_ON_PROBATION, _SUBMITTING_KEY = range(5, 10)
_BANK_SIZES = 10
_NUM_BANKS = 2
"""Maximum number of steps in flight, each with separate keys."""
_NUM_RUNNING, _NUM_USED_BLOCKS, _NUM_OUTPUT_TOKENS = range(12, 15)
_NUM_SHORTENED_RETENTIONS, _NUM_DROPPED_BLOCKS = range(15, 17)
_PROBATION_KEYS, _MAX_ON_PROBATION = 17, 64
_KEYS = _PROBATION_KEYS + _MAX_ON_PROBATION

_ROW_WORDS = 4
_ROW_OWNER, _ROW_HEARTBEATS, _ROW_NS = range(3)


class BoardError(Exception):
    """The memory is not a status board, or does not have the given row."""


class QueueState(NamedTuple):
    """The state of the engine's queue after the last step.

    Attributes:
        epoch: The number of the engine start, from 1; 0 before the first.
        num_waiting: Number of waiting outputs; a request with n outputs counts n times.
        num_waiting_tokens: Number of tokens of these outputs: prompt tokens, including cached ones,
            and tokens generated before a preemption.
        estimated_queue_s: Estimated queue time of the most recently queued output, in seconds; None
            without an estimate or if the queue is empty.
        at_s: Time of the last heartbeat on the monotonic clock; 0 before the first heartbeat.
    """

    epoch: int
    num_waiting: int
    num_waiting_tokens: int
    estimated_queue_s: float | None
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """The load of the engine after the last step.

    `num_running` and `num_waiting` count outputs. `num_used_blocks` counts blocks of the KV cache
    that running requests use; other cached blocks are not included. `num_output_tokens`,
    `num_shortened_retentions` and `num_dropped_blocks` (see `RetentionCuts`) are totals since the
    start of the engine.
    """

    epoch: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_used_blocks: int
    num_output_tokens: int
    num_shortened_retentions: int = 0
    num_dropped_blocks: int = 0


NO_LOAD = LoadState(
    epoch=0,
    num_running=0,
    num_waiting=0,
    num_waiting_tokens=0,
    num_used_blocks=0,
    num_output_tokens=0,
)


def create_board(max_num_keys: int) -> int:
    """Create the status board of an engine and return its descriptor.

    `max_num_keys` is the maximum number of outputs per step, each listed by its key. Child
    processes do not inherit the descriptor unless it is passed explicitly. Raises OSError if memory
    is exhausted.
    """
    num_words = _KEYS + _NUM_BANKS * max_num_keys
    fd = anonymous_file("penstock-board", num_words * _WORD_BYTES)
    os.pwrite(fd, struct.pack("<QQ", _MAGIC, max_num_keys), 0)
    return fd


def create_heartbeats(num_rows: int) -> int:
    """Create the memory for the heartbeats of at most `num_rows` fronts and return its descriptor.
    Raises OSError if memory is exhausted."""
    return anonymous_file("penstock-heartbeats", num_rows * _ROW_WORDS * _WORD_BYTES)


class EngineBoard:
    """Writes the engine's board. First clears the content of an earlier engine.

    `num_steps` is the maximum number of steps in flight, 1 or 2. The descriptor may be closed
    afterwards. The constructor raises BoardError if the memory is not an engine's board, and
    OSError if it cannot be mapped.
    """

    def __init__(self, fd: int, epoch: int, num_steps: int = 1) -> None:
        self._map, self._words = _map_words(fd)
        self._floats = memoryview(self._map).cast("d")
        self._max_keys = _max_keys_of(self._words)
        words = self._words
        for word in range(_NUM_HEARTBEATS, _KEYS):
            words[word] = 0
        self._floats[_QUEUE_S] = math.nan
        words[_EPOCH] = epoch
        self._num_banks = min(num_steps, _NUM_BANKS)
        self._bank = 0

    def heartbeat(self) -> None:
        """Increment the heartbeat count, to show that the engine's loop is running."""
        words = self._words
        words[_NUM_HEARTBEATS] += 1
        words[_HEARTBEAT_NS] = time.monotonic_ns()

    def publish_queue(
        self, num_waiting: int, num_waiting_tokens: int, estimated_queue_s: float | None
    ) -> None:
        """Publish the state of the queue, so that a front can decide whether to reject a request
        without a query to the engine. The arguments are described in `QueueState`."""
        words = self._words
        words[_NUM_WAITING] = num_waiting
        words[_NUM_WAITING_TOKENS] = num_waiting_tokens
        self._floats[_QUEUE_S] = math.nan if estimated_queue_s is None else estimated_queue_s

    def publish_load(self, num_running: int, num_used_blocks: int, num_output_tokens: int) -> None:
        """Publish the load, for load balancing. The arguments are described in `LoadState`."""
        words = self._words
        words[_NUM_RUNNING] = num_running
        words[_NUM_USED_BLOCKS] = num_used_blocks
        words[_NUM_OUTPUT_TOKENS] = num_output_tokens

    def publish_retention_cuts(self, num_shortened: int, num_dropped_blocks: int) -> None:
        """Publish the counts of `RetentionCuts` since the start of the engine."""
        words = self._words
        words[_NUM_SHORTENED_RETENTIONS] = num_shortened
        words[_NUM_DROPPED_BLOCKS] = num_dropped_blocks

    def mark_step(self, keys: "NDArray[np.int64]") -> None:
        """Publish the keys, int64 [n], of the outputs in the step that is about to be launched.

        Keys beyond the board's capacity are left out.
        """
        words, bank = self._words, self._bank
        keys = keys[: self._max_keys]
        # If the process is killed between the two writes, the board lists no requests for this
        # step, which had not started.
        words[_BANK_SIZES + bank] = 0
        start = (_KEYS + bank * self._max_keys) * _WORD_BYTES
        self._map[start : start + len(keys) * _WORD_BYTES] = keys.tobytes()
        words[_BANK_SIZES + bank] = len(keys)
        self._bank = (bank + 1) % self._num_banks

    def clear_step(self) -> None:
        """Publish that no step is in flight.

        Until this call the last steps stay on the board, because a crash may happen while their
        results are processed.
        """
        for bank in range(_NUM_BANKS):
            self._words[_BANK_SIZES + bank] = 0

    def mark_probation(self, keys: Sequence[int]) -> None:
        """Publish the keys of the outputs of the request on probation. Of the requests that may
        have crashed an engine, only this one runs now. `keys` is empty if there is none. Keys
        beyond the board's capacity are left out."""
        words = self._words
        words[_NUM_ON_PROBATION] = 0
        for place, key in enumerate(keys[:_MAX_ON_PROBATION]):
            words[_PROBATION_KEYS + place] = key
        words[_NUM_ON_PROBATION] = min(len(keys), _MAX_ON_PROBATION)

    def mark_submitting(self, key: int) -> None:
        """Publish the key of the first output of the request that is being submitted; 0 if there is
        none."""
        self._words[_SUBMITTING_KEY] = key

    def close(self) -> None:
        """Unmap the memory; its content stays. Idempotent."""
        for view in (self._words, self._floats):
            view.release()
        self._map.close()


class BoardView:
    """Reads the engine's board. The descriptor may be closed afterwards. The constructor raises
    BoardError if the memory is not an engine's board, and OSError if it cannot be mapped.

    Words are written one at a time. Each word is consistent, but two words may belong to different
    steps.
    """

    def __init__(self, fd: int) -> None:
        self._map, self._words = _map_words(fd, is_writer=False)
        self._floats = memoryview(self._map).cast("d")
        self._max_keys = _max_keys_of(self._words)

    @classmethod
    def from_fd(cls, fd: int) -> "BoardView | None":
        """Return the view of a descriptor and close the descriptor; return None for a negative
        descriptor."""
        if fd < 0:
            return None
        try:
            return cls(fd)
        finally:
            os.close(fd)

    @property
    def epoch(self) -> int:
        """The epoch of the engine that wrote most recently; 0 before the first engine."""
        return self._words[_EPOCH]

    @property
    def num_heartbeats(self) -> int:
        """Number of heartbeats of the engine's loop; 0 while it starts."""
        return self._words[_NUM_HEARTBEATS]

    @property
    def queue(self) -> QueueState:
        """The state of the queue that the engine published most recently."""
        words, queue_s = self._words, self._floats[_QUEUE_S]
        return QueueState(
            epoch=words[_EPOCH],
            num_waiting=words[_NUM_WAITING],
            num_waiting_tokens=words[_NUM_WAITING_TOKENS],
            estimated_queue_s=None if math.isnan(queue_s) else queue_s,
            at_s=words[_HEARTBEAT_NS] / 1e9,
        )

    @property
    def load(self) -> LoadState:
        """The load that the engine published most recently."""
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
        """Return the keys of the outputs of the request on probation; empty if there is none."""
        num_keys = min(self._words[_NUM_ON_PROBATION], _MAX_ON_PROBATION)
        return frozenset(self._words[_PROBATION_KEYS : _PROBATION_KEYS + num_keys])

    def keys_in_progress(self) -> frozenset[int]:
        """Return the keys of the outputs in the steps in flight, and the key of the first output of
        the request that is being submitted, if any."""
        keys: set[int] = set()
        for bank in range(_NUM_BANKS):
            first = _KEYS + bank * self._max_keys
            num_keys = min(self._words[_BANK_SIZES + bank], self._max_keys)
            keys.update(self._words[first : first + num_keys])
        keys.add(self._words[_SUBMITTING_KEY])
        keys.discard(0)
        return frozenset(keys)

    def close(self) -> None:
        """Unmap the memory. Idempotent."""
        for view in (self._words, self._floats):
            view.release()
        self._map.close()


class LivenessWriter:
    """Writes the heartbeats of one front to its row. The constructor raises BoardError if there is
    no such row, and OSError if the memory cannot be mapped."""

    def __init__(self, fd: int, row: int, front_id: int) -> None:
        self._map, self._words = _map_words(fd)
        self._first = row * _ROW_WORDS
        if not 0 <= self._first < len(self._words):
            raise BoardError(f"there is no row {row}")
        self._words[self._first + _ROW_HEARTBEATS] = 0
        self._words[self._first + _ROW_OWNER] = front_id

    def heartbeat(self) -> None:
        """Increment the heartbeat count, to show that the event loop is running."""
        words, first = self._words, self._first
        words[first + _ROW_HEARTBEATS] += 1
        words[first + _ROW_NS] = time.monotonic_ns()

    def close(self) -> None:
        """Unmap the memory. Idempotent."""
        self._words.release()
        self._map.close()


class LivenessReader:
    """Reads the heartbeats of all fronts. The constructor raises BoardError if the size of the
    memory is 0 or not a multiple of 8 bytes, and OSError if it cannot be mapped."""

    def __init__(self, fd: int) -> None:
        self._map, self._words = _map_words(fd, is_writer=False)

    def num_heartbeats(self, row: int, front_id: int) -> int:
        """Return the number of heartbeats of a front; 0 if `row` belongs to another front, or if
        this front has not started to write."""
        first = row * _ROW_WORDS
        if self._words[first + _ROW_OWNER] != front_id:
            return 0
        return self._words[first + _ROW_HEARTBEATS]

    def close(self) -> None:
        """Unmap the memory. Idempotent."""
        self._words.release()
        self._map.close()


def _map_words(fd: int, *, is_writer: bool = True) -> tuple[mmap.mmap, "memoryview[int]"]:
    num_bytes = os.fstat(fd).st_size
    if not num_bytes or num_bytes % _WORD_BYTES:
        raise BoardError(f"{num_bytes} bytes are not a board")
    access = mmap.ACCESS_WRITE if is_writer else mmap.ACCESS_READ
    mapped = mmap.mmap(fd, num_bytes, access=access)
    return mapped, memoryview(mapped).cast("Q")


def _max_keys_of(words: "memoryview[int]") -> int:
    if len(words) < _KEYS or words[_MAGIC_AT] != _MAGIC:
        raise BoardError("the content is not an engine's board")
    return words[_MAX_KEYS]
