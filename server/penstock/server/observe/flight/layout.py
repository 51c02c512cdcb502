"""The layout of the flight recorder's memory. A file of a recording has the same layout.

Defines the rows and the offsets in the header, and validates a shared-memory region or a file. A
recording has a header and three ring buffers: steps, events (one event of one request) and requests
(their ids and options). The number of rows of each ring is a power of two. Sequence numbers count
from 0; row n is at index n % size, so each ring has its newest `size` rows. One process writes
while others read. A row is valid if it was not overwritten while it was read. To detect this, the
reader compares the counts in the header before and after it reads the row.

Times are seconds on the machine's monotonic clock. The facts (metadata in JSON) include one pair of
clock readings, monotonic and Unix, to convert times. A recording contains no prompt, output or
token id.

The header, little-endian:

    0    MAGIC
    16   u4: layout version, bytes of the header, rows of each ring (steps, events, requests),
         bytes of the facts
    48   u8 generation: odd while a starting engine initialises the region, 0 before the
         first engine
    56   TOTALS
    136  u8 for each ring: number of the first valid row; only in copies, because rows may have been
         overwritten while the copy was made
    160  f8: time of the copy, monotonic clock; 0 in the region itself
    168  LAUNCH: the most recently launched step
    256  the facts, JSON
    4096 the rings, each page-aligned
"""

import enum
import struct
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import msgspec
import numpy as np

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo

MAGIC = b"penstock-flight\n"
LAYOUT_VERSION = 1
NO_REASON = 0
"""The value of `waits_for` if no request waited. Other values are those of `WaitReason`."""
STEP = np.dtype(
    [
        ("step", "<u8"),
        # Times: start of planning; launch; result available; result processed.
        ("begun_s", "<f8"),
        ("launched_s", "<f8"),
        ("collected_s", "<f8"),
        ("updated_s", "<f8"),
        # The inter-token latency of this step: the time from the previous step's result to this
        # one's, for the `num_itl` rows that decoded in this step and got a token; NaN if there was
        # none. Each such row got its last token in the previous step, except paused decodes: their
        # time without tokens is added in the step that resumes them. A request that was preempted
        # gets its next token from a prefill, so that gap is not included. For a self-paced engine
        # (see `FlightFacts`): the mean over the requests that got tokens in this iteration, each
        # since its previous tokens; requests that ended in it are not included.
        ("itl_s", "<f8"),
        ("predicted_s", "<f4"),
        ("num_itl", "<u4"),
        # For a self-paced engine, a prompt without a token yet is counted in its first step only.
        ("num_prefill_tokens", "<u4"),
        ("num_prefill_rows", "<u4"),
        ("num_decodes", "<u4"),
        ("num_context_tokens", "<u8"),  # Sum of the rows' positions at the end of the step.
        ("num_tokens", "<u4"),  # generated tokens
        ("num_running", "<u4"),
        ("num_waiting", "<u4"),
        ("num_waiting_tokens", "<u4"),
        ("num_used_blocks", "<u4"),
        ("num_cached_blocks", "<u4"),
        ("num_free_blocks", "<u4"),
        ("num_admitted", "<u2"),
        ("num_preempted", "<u2"),
        ("num_finished", "<u2"),
        ("num_failed", "<u2"),
        ("waits_for", "<u1"),
    ]
)
"""The row of a step that has returned its result."""
EVENT = np.dtype(
    [
        ("at_s", "<f8"),
        ("step", "<u8"),  # CHUNK: its step; other events: the last step whose result was processed.
        ("key", "<i8"),
        ("slot", "<i4"),  # -1: none
        # CHUNK: tokens computed. ADMITTED, PREFIX_FOUND: cached prompt tokens. QUEUED: requests
        # ahead. PREEMPTED, FINISHED and FAILED: output tokens so far.
        ("count", "<u4"),
        ("kind", "<u1"),
        ("reason", "<u1"),  # FINISHED: FinishReason, FAILED: FailureReason
    ]
)
"""The row of an event of one request."""
REQUEST = np.dtype(
    [
        ("key", "<i8"),
        ("arrival_s", "<f8"),
        ("ttft_deadline_s", "<f8"),
        ("deadline_s", "<f8"),
        ("num_prompt_tokens", "<u4"),
        ("max_tokens", "<u4"),
        ("priority", "<i4"),
        ("output_index", "<u2"),
        ("trace_id", "u1", (16,)),  # zeros: not traced
        ("request_id", "S64"),
        ("tenant", "S32"),
    ]
)
"""The row of a submitted output. Names are truncated to the size of the field."""
TOTALS = (
    "num_steps",
    "num_events",
    "num_requests",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_admitted",
    "num_preempted",
    "num_finished",
    "num_failed",
)
"""Counts since the start of the engine, in the header, `<u8` each.

The first three are also the numbers of rows written to the rings. Prompt tokens and cached prompt
tokens are counted at the first token of a request.
"""
_CODES = {"u": {1: "B", 2: "H", 4: "I", 8: "Q"}, "i": {4: "i", 8: "q"}, "f": {4: "f", 8: "d"}}
HEADER_BYTES = 4096
FACTS_OFFSET = 256
MAX_FACTS_BYTES = HEADER_BYTES - FACTS_OFFSET
SIZES = struct.Struct("<6I")
SIZES_OFFSET = len(MAGIC)
FACTS_SIZE_OFFSET = SIZES_OFFSET + 20
GENERATION_OFFSET = 48
TOTALS_OFFSET = 56
FIRST_OFFSET = TOTALS_OFFSET + 8 * len(TOTALS)
COPIED_OFFSET = FIRST_OFFSET + 24
LAUNCH_OFFSET = COPIED_OFFSET + 8
LAUNCH = struct.Struct("<QdIII")
"""The fields: step, launch time in seconds, decode rows, prefill rows, prefill tokens."""
RINGS: "tuple[np.dtype[Any], ...]" = (STEP, EVENT, REQUEST)
EVENTS_PER_STEP, REQUESTS_PER_STEP = 8, 4
_MIN_ROWS, _MAX_ROWS = 64, 1 << 24
_PAGE_BYTES = 4096
_MAX_MODEL_CHARS = 200


class EventKind(enum.IntEnum):
    """The kind of an event of one request.

    CHUNK is written when its step is launched, so that a recording also has the requests of a step
    that never returned. All other events are written at the end of an iteration. The number of
    cached tokens in ADMITTED is a prediction if the executor manages its blocks itself;
    PREFIX_FOUND then has the number that was found.
    """

    QUEUED = 1
    ADMITTED = 2
    CHUNK = 3
    FIRST_TOKEN = 4
    PREEMPTED = 5
    FINISHED = 6
    FAILED = 7
    PREFIX_FOUND = 8


def row_struct(row: "np.dtype[np.void]") -> struct.Struct:
    """Return the `struct.Struct` that packs one row. Packing is faster than assigning to a row of a
    structured array."""
    codes: list[str] = []
    for name in row.names or ():
        field = row[name]
        is_text = field.kind == "S" or field.shape
        codes.append(f"{field.itemsize}s" if is_text else _CODES[field.kind][field.itemsize])
    return struct.Struct("<" + "".join(codes))


class FlightError(ValueError):
    """A recording cannot be read or created. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The number of rows of each ring (steps, events, requests). All are powers of two."""

    num_rows: tuple[int, int, int]

    @classmethod
    def of_steps(cls, num_steps: int) -> "Geometry":
        """Return the geometry for `num_steps` steps.

        Raises FlightError unless `num_steps` is a power of two, and each ring is within the limits.
        """
        geometry = cls((num_steps, EVENTS_PER_STEP * num_steps, REQUESTS_PER_STEP * num_steps))
        geometry.check()
        return geometry

    @classmethod
    def of_header(cls, header: bytes, num_bytes: int) -> "Geometry":
        """Return the geometry in the header of a shared-memory region or file of `num_bytes` bytes.

        Raises FlightError if the header is invalid or has another layout version, or if
        `num_bytes` is not the size that the header implies (the recording is truncated).
        """
        if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
            raise FlightError("is not a flight record")
        version, header_bytes, *rows, num_facts_bytes = SIZES.unpack_from(header, SIZES_OFFSET)
        if version != LAYOUT_VERSION:
            raise FlightError(f"is of layout {version}, not {LAYOUT_VERSION}")
        geometry = cls((rows[0], rows[1], rows[2]))
        geometry.check()
        if header_bytes != HEADER_BYTES or num_facts_bytes > MAX_FACTS_BYTES:
            raise FlightError("has an inconsistent header")
        if num_bytes != geometry.num_bytes:
            raise FlightError(f"has {num_bytes} bytes, not {geometry.num_bytes}: it is truncated")
        return geometry

    def check(self) -> None:
        """Raise FlightError unless the number of rows of each ring is a power of two from 64 to
        2**24."""
        for num in self.num_rows:
            if not _MIN_ROWS <= num <= _MAX_ROWS or num & (num - 1):
                raise FlightError(
                    f"rings must have a power of two in {_MIN_ROWS}..{_MAX_ROWS} rows, not {num}"
                )

    def offset(self, ring: int) -> int:
        """Return the offset of ring number `ring` (0 to 2) in bytes; for 3, the end of the last
        ring."""
        at = HEADER_BYTES
        for row, num in zip(RINGS[:ring], self.num_rows[:ring], strict=True):
            at += -(-row.itemsize * num // _PAGE_BYTES) * _PAGE_BYTES
        return at

    @property
    def num_bytes(self) -> int:
        """Size of the header and the rings, in bytes."""
        return self.offset(len(RINGS))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightFacts:
    """Metadata of the recorded engine. `block_size` is in tokens.

    `epoch` increases with every start of an engine. `clock_s` and `unix_s` are the start of the
    recording, in seconds on the monotonic clock and in seconds since 1970. If `is_self_paced`, the
    executor schedules its own batches; a step is then one iteration that collects available
    results, without a predicted time.
    """

    model: str
    executor: str
    epoch: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    pipeline_depth: int
    is_self_paced: bool
    clock_s: float
    unix_s: float
    version: str

    def unix_time_s(self, at_s: float) -> float:
        """Convert a time of the recording to seconds since 1970."""
        return self.unix_s + (at_s - self.clock_s)


def facts_of(model: str, epoch: int, info: ExecutorInfo, config: SchedulerConfig) -> FlightFacts:
    """Return the metadata for the recording of an engine that starts now."""
    return FlightFacts(
        model=model[:_MAX_MODEL_CHARS],
        executor=info.name,
        epoch=epoch,
        max_num_seqs=info.max_num_seqs,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        pipeline_depth=info.pipeline_depth,
        is_self_paced=info.is_self_paced,
        clock_s=time.monotonic(),
        unix_s=time.time(),
        version=_version(),
    )


def encode_facts(facts: FlightFacts) -> bytes:
    """Encode the metadata as JSON for the header."""
    return msgspec.json.encode(facts)


def decode_facts(data: bytes) -> FlightFacts:
    """Decode the result of `encode_facts`. Raises ValueError for other bytes."""
    try:
        return msgspec.json.decode(data, type=FlightFacts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _version() -> str:
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "unknown"
