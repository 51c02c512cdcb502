"""One request handed to the engine, seen from both threads.

Owns the record that the scheduler's side and the loop's side share: each field has one writer.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.request import RequestSpec


@dataclass(slots=True, eq=False)
class SubmittedRequest:
    """A request that was admitted, until the engine has released it.

    Fixed: `spec`, `tokens` int32 [n] (all that was known at admission), `num_blocks` (the most it
    may come to hold), `num_cached` (prompt tokens the page mirror expects to be reused).
    The scheduler's thread writes `slot`, -1 once it was given back.
    """

    spec: RequestSpec
    tokens: NDArray[np.int32]
    slot: int
    num_blocks: int
    num_cached: int
    num_logprobs: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_logprobs = self.spec.sampling.num_logprobs
