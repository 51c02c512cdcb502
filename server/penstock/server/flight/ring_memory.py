"""The recorder's side of the memory: appending rows, counting, starting afresh.

Owns the order of writes that lets others read meanwhile: a row first, the count that makes it one
after it. Does not know what the rows mean.
"""

import struct
from collections.abc import Callable

from penstock.server.flight.facts import FlightFacts, encode_facts
from penstock.server.flight.geometry import (
    COPIED_OFFSET,
    FACTS_OFFSET,
    FACTS_SIZE_OFFSET,
    FIRST_OFFSET,
    GENERATION_OFFSET,
    LAUNCH,
    LAUNCH_OFFSET,
    MAX_FACTS_BYTES,
    RINGS,
    TOTALS_OFFSET,
    FlightError,
)
from penstock.server.flight.layout import STEP, TOTALS, row_struct
from penstock.server.flight.memory import map_memory

STEP_RING, EVENT_RING, REQUEST_RING = range(3)


class RingMemory:
    """The mapped memory, for the one process that writes; what another left there is gone.

    `totals`: the counts of `layout.TOTALS`, whole 8-byte words, so that nobody sees half of one;
    the first three are the rings' own. Raises FlightError, OSError.
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

    def append(self, ring: int, *values: object) -> None:
        """One more row of a ring; raises struct.error for values that its fields cannot hold."""
        totals, row = self.totals, self._structs[ring]
        num = totals[ring]
        offset = self._offsets[ring] + (num & self._masks[ring]) * row.size
        row.pack_into(self._map, offset, *values)
        totals[ring] = num + 1

    def step_packer(self) -> Callable[..., None]:
        """`append` to the steps, for those who do it in every step: half the time."""
        pack, data, totals = self._structs[STEP_RING].pack_into, self._map, self.totals
        offset, mask, size = self._offsets[STEP_RING], self._masks[STEP_RING], STEP.itemsize

        def append(*values: object) -> None:
            num = totals[STEP_RING]
            pack(data, offset + (num & mask) * size, *values)
            totals[STEP_RING] = num + 1

        return append

    def note_launch(self, *values: object) -> None:
        """The step that was launched last, as `geometry.LAUNCH`."""
        LAUNCH.pack_into(self._map, LAUNCH_OFFSET, *values)

    def close(self) -> None:
        """Unmap; what was written stays. Idempotent."""
        for view in (self._generation, self.totals, self._view):
            view.release()
        self._map.close()

    def _reset(self, facts: FlightFacts) -> None:
        data = encode_facts(facts)
        if len(data) > MAX_FACTS_BYTES:
            raise FlightError(f"the facts have {len(data)} bytes, at most {MAX_FACTS_BYTES} fit")
        # Odd if the engine before was killed right here.
        self._generation[0] |= 1
        for number in range(len(TOTALS)):
            self.totals[number] = 0
        self._map[FIRST_OFFSET:COPIED_OFFSET] = bytes(COPIED_OFFSET - FIRST_OFFSET)
        self._map[LAUNCH_OFFSET : LAUNCH_OFFSET + LAUNCH.size] = bytes(LAUNCH.size)
        self._map[FACTS_OFFSET : FACTS_OFFSET + len(data)] = data
        struct.pack_into("<I", self._map, FACTS_SIZE_OFFSET, len(data))
        self._generation[0] += 1
