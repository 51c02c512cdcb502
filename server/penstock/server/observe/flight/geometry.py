"""Where things lie in the memory of a flight recorder: the header's fields and the three rings.

Owns the offsets and the check that a memory or a file is one of ours. Does not read rows.

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

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.server.observe.flight.layout import (
    EVENT,
    LAYOUT_VERSION,
    MAGIC,
    REQUEST,
    STEP,
    TOTALS,
)

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
