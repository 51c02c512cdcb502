"""How the flight recorder lies in memory, and so in its files.

Owns the rows, the offsets of the header, and the check that a memory or a file is one of ours. A
recording is three rings, each of a power of two of rows, behind a header: steps, events (what
happened once to one request) and requests (who they are).
Sequence numbers count from 0; row n lies at index n % size, so the newest `size` of each are there.
Written by one process and read by others while it writes: a row is valid if it was not overwritten
meanwhile, which the reader sees from the counts in the header, read before and after.

Times are seconds on the machine's monotonic clock. No prompt, no output, no token id is in it.

The header, little-endian:

    0    MAGIC
    16   u4: layout version, bytes of the header, rows of each ring (steps, events, requests),
         bytes of the facts
    48   u8 generation: odd while an engine that starts makes the memory its own, 0 before the first
    56   TOTALS
    136  u8 for each ring: the first row that counts; only in copies, which were made while rows
         were written over
    160  f8: when the copy was made, monotonic clock; 0 in the memory itself
    168  LAUNCH: the step that was launched last
    256  the facts, JSON
    4096 the rings, each on a page of its own
"""

import enum
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

MAGIC = b"penstock-flight\n"
LAYOUT_VERSION = 1
NO_REASON = 0
"""In `waits_for`: no request waited. Other values are those of `WaitReason`."""


class EventKind(enum.IntEnum):
    """What happened to one request.

    CHUNK is written when its step is launched, so that a step which never came back has left who
    was in it; everything else when the step's result is in. PREFIX_FOUND: the executor's own cache
    held so much of the prompt, in place of what ADMITTED foresaw.
    """

    QUEUED = 1
    ADMITTED = 2
    CHUNK = 3
    FIRST_TOKEN = 4
    PREEMPTED = 5
    FINISHED = 6
    FAILED = 7
    PREFIX_FOUND = 8


STEP = np.dtype(
    [
        ("step", "<u8"),
        # Planning began; the executor was given the step; its result was there, and was taken in.
        ("begun_s", "<f8"),
        ("launched_s", "<f8"),
        ("collected_s", "<f8"),
        ("updated_s", "<f8"),
        # The gap between tokens: from the result of the step before to this one's, for the
        # `num_itl` rows that decoded in it and got a token; NaN when there was none. Every decode
        # row of a step had its last token from the step before. Whoever comes back from a
        # preemption gets its next token from a prefill, so that gap is not among these. Of an
        # engine that paces itself: the mean over those who got tokens in this turn, each since the
        # turn that brought it the ones before; without those who ended in it.
        ("itl_s", "<f8"),
        ("predicted_s", "<f4"),
        ("num_itl", "<u4"),
        # A prompt that an engine which paces itself has not answered counts in its first step only.
        ("num_prefill_tokens", "<u4"),
        ("num_prefill_rows", "<u4"),
        ("num_decodes", "<u4"),
        ("num_context_tokens", "<u8"),  # of all rows, their positions at the end of the step
        ("num_tokens", "<u4"),  # that came out
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
"""One step whose result is in."""

EVENT = np.dtype(
    [
        ("at_s", "<f8"),
        ("step", "<u8"),  # CHUNK: the one it is part of; else the last one whose result was in
        ("key", "<i8"),
        ("slot", "<i4"),  # -1: none
        # CHUNK: tokens computed. ADMITTED, PREFIX_FOUND: of its prompt, found cached. QUEUED:
        # requests ahead. PREEMPTED, FINISHED and FAILED: tokens of output so far.
        ("count", "<u4"),
        ("kind", "<u1"),
        ("reason", "<u1"),  # FINISHED: FinishReason, FAILED: FailureReason
    ]
)
"""What happened once to one request."""

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
"""One output that was submitted. Names are cut to what fits."""

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
"""Counts since the engine's start, in the header, `<u8` each; the first three also say how much of
each ring is written. Prompt tokens, and those of them that were found cached, are of requests that
had their first token, counted then."""

_CODES = {"u": {1: "B", 2: "H", 4: "I", 8: "Q"}, "i": {4: "i", 8: "q"}, "f": {4: "f", 8: "d"}}


def row_struct(row: "np.dtype[np.void]") -> struct.Struct:
    """What packs one row: ten times faster than assigning to a structured array's row."""
    codes: list[str] = []
    for name in row.names or ():
        field = row[name]
        is_text = field.kind == "S" or field.shape
        codes.append(f"{field.itemsize}s" if is_text else _CODES[field.kind][field.itemsize])
    return struct.Struct("<" + "".join(codes))


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
"""Step, when it was launched, its decode rows, prefill rows and prefill tokens."""
RINGS: "tuple[np.dtype[Any], ...]" = (STEP, EVENT, REQUEST)
EVENTS_PER_STEP, REQUESTS_PER_STEP = 8, 4
_MIN_ROWS, _MAX_ROWS = 64, 1 << 24
_PAGE_BYTES = 4096


class FlightError(ValueError):
    """A recording cannot be read or made; the message says why."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Rows of the rings: steps, events, requests; powers of two."""

    num_rows: tuple[int, int, int]

    @classmethod
    def of_steps(cls, num_steps: int) -> "Geometry":
        """For so many steps. Raises FlightError when it is no power of two in its bounds."""
        geometry = cls((num_steps, EVENTS_PER_STEP * num_steps, REQUESTS_PER_STEP * num_steps))
        geometry.check()
        return geometry

    @classmethod
    def of_header(cls, header: bytes, num_bytes: int) -> "Geometry":
        """As a memory or file of `num_bytes` says. Raises FlightError when it is none of ours."""
        if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
            raise FlightError("is not a flight recording")
        version, header_bytes, *rows, num_facts_bytes = SIZES.unpack_from(header, SIZES_OFFSET)
        if version != LAYOUT_VERSION:
            raise FlightError(f"is of layout {version}, not {LAYOUT_VERSION}")
        geometry = cls((rows[0], rows[1], rows[2]))
        geometry.check()
        if header_bytes != HEADER_BYTES or num_facts_bytes > MAX_FACTS_BYTES:
            raise FlightError("has a header that does not add up")
        if num_bytes != geometry.num_bytes:
            raise FlightError(f"has {num_bytes} bytes, not {geometry.num_bytes}: it was cut off")
        return geometry

    def check(self) -> None:
        """Raise FlightError for rings of a size that no recorder has."""
        for num in self.num_rows:
            if not _MIN_ROWS <= num <= _MAX_ROWS or num & (num - 1):
                raise FlightError(
                    f"rings must have a power of two in {_MIN_ROWS}..{_MAX_ROWS} rows, not {num}"
                )

    def offset(self, ring: int) -> int:
        """Where a ring begins; 3: where the last one ends."""
        at = HEADER_BYTES
        for row, num in zip(RINGS[:ring], self.num_rows[:ring], strict=True):
            at += -(-row.itemsize * num // _PAGE_BYTES) * _PAGE_BYTES
        return at

    @property
    def num_bytes(self) -> int:
        """Of the whole."""
        return self.offset(len(RINGS))
