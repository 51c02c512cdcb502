"""Token ids as the records of a `PromptEcho` message, without a Python object for each.

Owns the bytes of such a record. Making the objects and serialising them takes some microseconds a
token: a prompt of 128 Ki tokens would block the event loop for over half a second.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

_RECORDS: Final = 2 << 3 | 2
"""Field 2 of `PromptEcho`, with a length."""
_ID: Final = 1 << 3
"""Field 1 of `TokenRecord`, a varint."""
_MAX_VARINT_BYTES: Final = 5
_IDS_AT_ONCE: Final = 4096
"""Arrays of this size fit into the cache."""


def encoded_id_records(ids: NDArray[np.int32], num_per_part: int) -> Iterator[bytes]:
    """Serialised `PromptEcho` messages with the records of `ids`, in chunks; none for no ids."""
    num_at_once = num_per_part * max(1, _IDS_AT_ONCE // num_per_part)
    for first in range(0, len(ids), num_at_once):
        data, ends = _records(ids[first : first + num_at_once])
        start = 0
        for end in (*ends[num_per_part - 1 : -1 : num_per_part], ends[-1]):
            yield data[start:end]
            start = end


def _records(ids: NDArray[np.int32]) -> tuple[bytes, list[int]]:
    """The records of `ids`, and the end offset of each."""
    values = ids.astype(np.uint32)
    rows = np.empty((len(values), 3 + _MAX_VARINT_BYTES), dtype=np.uint8)
    is_written = np.ones(rows.shape, dtype=np.bool_)
    rows[:, 0], rows[:, 2] = _RECORDS, _ID
    # An id of zero is not written: the record has no field.
    is_written[:, 2] = values > 0
    for place in range(3, rows.shape[1]):
        is_written[:, place] = values > 0
        rows[:, place] = values & 0x7F
        values >>= 7
        rows[:, place] |= (values > 0).astype(np.uint8) << 7
    sizes = is_written.sum(axis=1)
    rows[:, 1] = sizes - 2
    return rows[is_written].tobytes(), np.cumsum(sizes).tolist()
