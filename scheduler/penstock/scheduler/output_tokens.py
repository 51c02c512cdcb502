"""The tokens that a live request has generated so far, for whoever has to go on with it elsewhere.

Owns where they are found: in the slot arrays while it runs, with the request while it waits.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.lifecycle import Lifecycle
from penstock.scheduler.state import RequestState


def output_tokens(life: Lifecycle, key: int) -> NDArray[np.int32] | None:
    """A copy, int32 [n], those of earlier lives included; None when no live request has the key.

    Tokens of steps that were launched and not collected are not among them.
    """
    request = life.requests.get(key)
    if request is None:
        return None
    num_prompt = request.spec.num_original_prompt_tokens
    if request.state is RequestState.PROCESSING:
        arrays, slot = life.arrays, request.slot
        return arrays.token_ids[slot, num_prompt : arrays.num_tokens[slot]].copy()
    return request.tokens[num_prompt:].copy()
