"""Per-slot data that the slot arrays do not contain: logit bias, and the reason why a request
cannot run.

Rejects input that could affect other requests on the device. The front (gRPC server process)
rejects such requests earlier; if one reaches the executor, only that request fails.
"""

import math

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import Batch
from penstock.scheduler.request import Request, SamplingParams


class SlotRules:
    """Rules for the requests in slots, kept from admission to release.

    `bias` maps a slot to the token ids of its logit bias and the values added to their logits.
    `rejections` maps a slot to the reason why its request cannot run.
    """

    def __init__(self, *, vocab_size: int, num_embeddings: int) -> None:
        self._vocab_size = vocab_size
        self._num_embeddings = num_embeddings
        self.bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self.rejections: dict[int, str] = {}

    def update(self, batch: Batch) -> None:
        """Delete the rules of a batch's released slots; set the rules of its admitted requests."""
        for slot in batch.released:
            self.bias.pop(slot, None)
            self.rejections.pop(slot, None)
        for request in batch.admitted:
            if request.slot >= 0:
                self._admit(request)

    def _admit(self, request: Request) -> None:
        slot, sampling = request.slot, request.spec.sampling
        self.bias.pop(slot, None)
        self.rejections.pop(slot, None)
        rejection = self._rejection(request)
        if rejection:
            self.rejections[slot] = rejection
        elif sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self.bias[slot] = (np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32))

    def _rejection(self, request: Request) -> str:
        tokens, sampling = request.tokens, request.spec.sampling
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._num_embeddings:
            return "prompt_ids: a token is outside the vocabulary"
        for token, value in sampling.logit_bias:
            if not 0 <= token < self._vocab_size:
                return f"logit_bias: token {token} is outside the vocabulary"
            if math.isnan(value) or value == math.inf:
                return f"logit_bias: {value} for token {token}"
        return _sampling_rejection(sampling)


def _sampling_rejection(sampling: SamplingParams) -> str:
    """Return why a sampling parameter gives no valid distribution, or an empty string."""
    checks = (
        ("temperature", 0.0 <= sampling.temperature < math.inf),
        ("top_p", 0.0 < sampling.top_p <= 1.0),
        ("min_p", 0.0 <= sampling.min_p <= 1.0),
        ("top_k", sampling.top_k >= 0),
        ("repetition_penalty", 0.0 < sampling.repetition_penalty < math.inf),
        ("presence_penalty", math.isfinite(sampling.presence_penalty)),
        ("frequency_penalty", math.isfinite(sampling.frequency_penalty)),
    )
    return next((f"{name} is out of range" for name, is_good in checks if not is_good), "")
