"""A launched step, until its result is collected.

Owns what `update` must know about a batch that the arrays no longer show: which rows sample, at
which positions, and which prefill chunks they finish.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import Batch
from penstock.scheduler.request import Request
from penstock.scheduler.rows import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A prefill row: `count` tokens of `request` from position `start` on.

    `completes` when no known token is left: the row samples the next one.
    """

    request: Request
    slot: int
    start: int
    count: int
    completes: bool


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """One batch in flight.

    `rows`: the m slots that sample; `positions` int32 [m]: position of the token each samples.
    `ones` int32 [high_water] as in DecodeRoster when the rows are exactly a decode roster's, else
    None. `dropped`: slots released since the launch.
    """

    batch: Batch
    rows: Rows
    positions: NDArray[np.int32]
    ones: NDArray[np.int32] | None
    chunks: tuple[Chunk, ...]
    dropped: set[int] = field(default_factory=set[int])
