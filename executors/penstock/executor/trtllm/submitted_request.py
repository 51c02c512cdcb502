"""A request submitted to the engine, shared by both threads: each field has one writer."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.request import RequestSpec


@dataclass(slots=True, eq=False)
class SubmittedRequest:
    """A request, from its admission until the engine has released it.

    Fixed: `spec`, `tokens` int32 [n] (all tokens known at admission), `num_blocks` (the maximum it
    may hold), `num_cached` (prompt tokens that the page mirror expects to be reused). The
    scheduler's thread writes `slot`, -1 once it is released.
    """

    spec: RequestSpec
    tokens: NDArray[np.int32]
    slot: int
    num_blocks: int
    num_cached: int
    num_logprobs: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_logprobs = self.spec.sampling.num_logprobs
