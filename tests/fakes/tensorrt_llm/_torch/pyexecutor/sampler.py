"""The two samplers of release 1.2, and which request parameters each of them reads.

TorchSampler, the default, ignores penalties (NVIDIA/TensorRT-LLM issue #9442), seeds (all requests
share one generator) and min_p; it compares `min_tokens` with the length of prompt and output.
TRTLLMSampler applies them all; its `min_tokens` counts output tokens. In both, `min_tokens` bars
only `end_id`.
"""

import random
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorrt_llm._torch.pyexecutor.hashed_model import HashedModel
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest, Logprobs
from tensorrt_llm.sampling_params import is_greedy

NO_WAY = -np.inf
_MASK = (1 << 64) - 1


class DeviceAssertError(RuntimeError):
    """A guide allows no token. On a GPU such an error ends the CUDA context, and with
    it the engine.
    """


class TorchSampler:
    def __init__(self, model: HashedModel) -> None:
        self._model = model
        self._generator = random.Random(0)

    def choose(self, request: LlmRequest) -> tuple[int, Logprobs | None]:
        """Return the next token and, if requested, logprobs of the likeliest tokens and of the
        chosen one. Raises DeviceAssertError if the guide allows no token.
        """
        params, logits = request.params, self._model.logits(request.state)
        self._edit(request, logits)
        if is_greedy(params):
            token = int(logits.argmax())
        else:
            temperature = 1.0 if params.temperature is None else params.temperature
            weights = self._narrowed(params, logits / temperature)
            sums = weights.cumsum()
            drawn = self._uniform(request) * sums[-1]
            token = int(np.searchsorted(sums, drawn, side="right"))
        if not params.logprobs:
            return token, None
        return token, self._logprobs(logits, token, params.logprobs)

    def _logprobs(self, logits: NDArray[np.float64], token: int, count: int) -> Logprobs:
        """Return logprobs and ranks of the `count` likeliest tokens and of the chosen one."""
        top = logits.max()
        normaliser = top + float(np.log(np.exp(logits - top).sum()))
        order = np.argsort(-logits, kind="stable").tolist()
        ranked = {*order[:count], token}
        return {
            each: (float(logits[each] - normaliser), rank)
            for rank, each in enumerate(order, start=1)
            if each in ranked
        }

    def _edit(self, request: LlmRequest, logits: NDArray[np.float64]) -> None:
        params = request.params
        if params.embedding_bias is not None:
            logits += np.asarray(params.embedding_bias, dtype=np.float64)
        self._penalise(request, logits)
        if request.end_id >= 0 and self._counted_length(request) < (params.min_tokens or 0):
            logits[request.end_id] = NO_WAY
        if request.guide is not None:
            allowed = request.guide.allowed(request.generated)
            if not allowed:
                raise DeviceAssertError("CUDA error: device-side assert triggered")
            kept = logits[allowed]
            logits[:] = NO_WAY
            logits[allowed] = kept

    def _penalise(self, request: LlmRequest, logits: NDArray[np.float64]) -> None:
        """Do nothing: this sampler ignores penalties."""

    def _counted_length(self, request: LlmRequest) -> int:
        return len(request.prompt) + len(request.generated)

    def _uniform(self, request: LlmRequest) -> float:
        return self._generator.random()

    def _narrowed(self, params: Any, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return weights [vocab] that are 0 for tokens that top_k or top_p excludes."""
        weights: NDArray[np.float64] = np.exp(logits - logits.max())
        top_k = params.top_k or 0
        if 0 < top_k < len(weights):
            weights[weights < np.partition(weights, -top_k)[-top_k]] = 0.0
        if params.top_p is not None and params.top_p < 1.0:
            order = np.argsort(-weights, kind="stable")
            sums = weights[order].cumsum() / weights.sum()
            weights[order[1:][sums[:-1] >= params.top_p]] = 0.0
        return weights


class TRTLLMSampler(TorchSampler):
    """The C++ decoder's sampler. It is deprecated, but supports more parameters."""

    def _penalise(self, request: LlmRequest, logits: NDArray[np.float64]) -> None:
        params = request.params
        repetition = params.repetition_penalty or 1.0
        seen = list({*request.prompt, *request.generated})
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / repetition, values * repetition)
        for token, count in Counter(request.generated).items():
            logits[token] -= (params.presence_penalty or 0.0) + (
                params.frequency_penalty or 0.0
            ) * count

    def _logprobs(self, logits: NDArray[np.float64], token: int, count: int) -> Logprobs:
        """Return only the logprob of the chosen token, always with rank 1."""
        return {token: (super()._logprobs(logits, token, count)[token][0], 1)}

    def _counted_length(self, request: LlmRequest) -> int:
        return len(request.generated)

    def _uniform(self, request: LlmRequest) -> float:
        seed = request.params.seed or 0
        mixed = ((request.state ^ (seed * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
        return ((mixed ^ (mixed >> 31)) >> 11 & ((1 << 53) - 1)) / (1 << 53)

    def _narrowed(self, params: Any, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        weights = super()._narrowed(params, logits)
        weights[weights < (params.min_p or 0.0) * weights.max()] = 0.0
        return weights
