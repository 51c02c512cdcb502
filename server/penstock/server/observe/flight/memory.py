"""Creates, maps and writes the shared memory of a flight recorder.

Writes in an order that permits concurrent readers: first the row, then the count that includes it.
The memory exists while any process has its descriptor open, so nothing is lost when the engine is
killed. This module does not interpret the rows.
"""

import functools
import mmap
import os
import struct
from collections.abc import Callable

from penstock.server.ipc.anonymous_file import anonymous_file
from penstock.server.observe.flight.layout import (
    COPIED_OFFSET,
    FACTS_OFFSET,
    FACTS_SIZE_OFFSET,
    FIRST_OFFSET,
    GENERATION_OFFSET,
    HEADER_BYTES,
    LAUNCH,
    LAUNCH_OFFSET,
    LAYOUT_VERSION,
    MAGIC,
    MAX_FACTS_BYTES,
    RINGS,
    SIZES,
    SIZES_OFFSET,
    TOTALS,
    TOTALS_OFFSET,
    FlightError,
    FlightFacts,
    Geometry,
    encode_facts,
    row_struct,
)


def create_memory(num_steps: int, name: str) -> int:
    """Create the memory for the last `num_steps` steps (a power of two) and return its file
    descriptor.

    Child processes do not inherit the descriptor by default. Raises FlightError for an invalid
    size, and OSError if the memory cannot be allocated.
    """
    geometry = Geometry.of_steps(num_steps)
    fd = anonymous_file(name, geometry.num_bytes)
    try:
        sizes = SIZES.pack(LAYOUT_VERSION, HEADER_BYTES, *geometry.num_rows, 0)
        os.pwrite(fd, sizes, SIZES_OFFSET)
        os.pwrite(fd, MAGIC, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int, *, is_writer: bool = False) -> tuple[mmap.mmap, Geometry]:
    """Map the memory of a descriptor, and return the mapping and its geometry. The descriptor may
    be closed afterwards.

    The mapping is read-only unless `is_writer`. Raises FlightError if the memory is not a valid
    recording, and OSError if it cannot be mapped.
    """
    num_bytes = os.fstat(fd).st_size
    if num_bytes < HEADER_BYTES:
        raise FlightError("is not a flight record")
    access = mmap.ACCESS_WRITE if is_writer else mmap.ACCESS_READ
    mapped = mmap.mmap(fd, num_bytes, access=access)
    try:
        return mapped, Geometry.of_header(mapped[:HEADER_BYTES], num_bytes)
    except FlightError:
        mapped.close()
        raise


STEP_RING, EVENT_RING, REQUEST_RING = range(3)
_MAX_BATCH = 16
"""Maximum number of rows that are packed together."""


class RingMemory:
    """Writes rows and counts to the mapped memory. The memory must have at most one writer at a
    time. The constructor discards earlier content and writes `facts`, the metadata of the engine.

    `totals` has the counts of `layout.TOTALS` as 8-byte words, so that readers never see a
    partially written count. The first three are the row counts of the rings. The constructor raises
    FlightError if the memory is invalid or `facts` are too large, and OSError if it cannot be
    mapped.
    """

    def __init__(self, fd: int, facts: FlightFacts) -> None:
        self._map, self._geometry = map_memory(fd, is_writer=True)
        view = memoryview(self._map)
        self._generation = view[GENERATION_OFFSET:TOTALS_OFFSET].cast("Q")
        self.totals = view[TOTALS_OFFSET:FIRST_OFFSET].cast("Q")
        self._view = view
        self._masks = [num - 1 for num in self._geometry.num_rows]
        self._offsets = [self._geometry.offset(ring) for ring in range(len(RINGS))]
        self._structs = [row_struct(row) for row in RINGS]
        self._reset(facts)

    def appender(self, ring: int) -> Callable[..., None]:
        """Return a function that adds one row to ring number `ring`, with the fields of the row in
        order as arguments.

        The function raises struct.error if a value does not fit its field.
        """
        pack, data, totals = self._structs[ring].pack_into, self._map, self.totals
        offset, mask, size = self._offsets[ring], self._masks[ring], self._structs[ring].size

        def append(*values: object) -> None:
            num = totals[ring]
            pack(data, offset + (num & mask) * size, *values)
            totals[ring] = num + 1

        return append

    def append(self, ring: int, *values: object) -> None:
        """Add one row, with its fields in order as `values`. For many rows, `appender` is
        faster."""
        self.appender(ring)(*values)

    def batch_appender(self, ring: int) -> Callable[[list[object]], None]:
        """Return a function that adds rows to a ring, with a flat list of their fields as argument.

        Several rows cost little more than one. The function raises struct.error if a value does not
        fit its field.
        """
        data, totals, row = self._map, self.totals, self._structs[ring]
        offset, num_places = self._offsets[ring], self._masks[ring] + 1
        num_fields, codes = len(RINGS[ring].names or ()), row.format[1:]
        packers: list[Callable[..., None]] = [
            struct.Struct("<" + codes * num_rows).pack_into for num_rows in range(_MAX_BATCH + 1)
        ]

        def append(values: list[object]) -> None:
            num_left = len(values) // num_fields
            if num_left == 0:
                return
            num, at = totals[ring], 0
            while num_left:
                place = num % num_places
                num_rows = min(num_left, num_places - place, _MAX_BATCH)
                fields = num_rows * num_fields
                packers[num_rows](data, offset + place * row.size, *values[at : at + fields])
                num, at, num_left = num + num_rows, at + fields, num_left - num_rows
                totals[ring] = num

        return append

    def launch_writer(self) -> Callable[..., None]:
        """Return a function that records the most recently launched step.

        Its arguments are the fields of `layout.LAUNCH`.
        """
        return functools.partial(LAUNCH.pack_into, self._map, LAUNCH_OFFSET)

    def close(self) -> None:
        """Unmap the memory; its content remains. Idempotent."""
        for view in (self._generation, self.totals, self._view):
            view.release()
        self._map.close()

    def _reset(self, facts: FlightFacts) -> None:
        data = encode_facts(facts)
        if len(data) > MAX_FACTS_BYTES:
            raise FlightError(f"the facts have {len(data)} bytes, at most {MAX_FACTS_BYTES} fit")
        # The generation is odd if the previous engine was killed at this point.
        self._generation[0] |= 1
        for number in range(len(TOTALS)):
            self.totals[number] = 0
        self._map[FIRST_OFFSET:COPIED_OFFSET] = bytes(COPIED_OFFSET - FIRST_OFFSET)
        self._map[LAUNCH_OFFSET : LAUNCH_OFFSET + LAUNCH.size] = bytes(LAUNCH.size)
        self._map[FACTS_OFFSET : FACTS_OFFSET + len(data)] = data
        struct.pack_into("<I", self._map, FACTS_SIZE_OFFSET, len(data))
        self._generation[0] += 1
