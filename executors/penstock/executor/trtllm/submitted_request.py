"""A request for the engine, shared by the scheduler's thread and the event loop's thread. Only
`slot` changes.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.request import RequestSpec


@dataclass(slots=True, eq=False)
class SubmittedRequest:
    """A request, from its admission until the engine has released it.

    Constant fields: `spec`; `tokens` int32 [n], the prompt and any earlier output; `num_blocks`,
    the KV cache blocks that the request needs at its maximum length; `num_cached`, the prompt
    tokens that the scheduler expects the engine to find in its cache; `num_logprobs`, negative if
    log probabilities were not requested. The scheduler's thread sets `slot` to -1 when it releases
    the slot.
    """

    spec: RequestSpec
    tokens: NDArray[np.int32]
    slot: int
    num_blocks: int
    num_cached: int
    num_logprobs: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_logprobs = self.spec.sampling.num_logprobs
