"""The two samplers of release 1.2 and the request parameters that each of them reads.

TorchSampler, the default: ignores penalties (NVIDIA/TensorRT-LLM issue #9442), seeds (all requests
share one generator) and min_p, and compares `min_tokens` with the whole length, for `end_id` alone.
TRTLLMSampler applies them all; its `min_tokens` counts output tokens and bars `end_id` alone.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from tensorrt_llm._torch.pyexecutor.hashed_model import HashedModel
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest

NO_WAY = -np.inf
_MASK = (1 << 64) - 1
Logprobs = dict[int, tuple[float, int]]


class DeviceAssertError(RuntimeError):
    """All logits are non-finite: on a GPU this ends the CUDA context, and with it the engine."""


class TorchSampler:
    """Chooses the next token of a request."""

    honours_min_p = False

    def __init__(self, model: HashedModel) -> None:
        self._model = model
        self._generator = random.Random(0)

    def choose(self, request: LlmRequest) -> tuple[int, Logprobs | None]:
        """Return the next token and, if requested, logprobs of the top tokens and of the chosen
        one."""
        logits = self._model.logits(request.state)
        self._edit(request, logits)
        if request.is_greedy:
            token = int(logits.argmax())
        else:
            min_p = request.min_p if self.honours_min_p else 0.0
            weights = _narrowed(request, logits / request.temperature, min_p)
            token = self._draw(weights, request)
        if not request.num_logprobs:
            return token, None
        return token, self._logprobs(logits, token, request.num_logprobs)

    def _logprobs(self, logits: NDArray[np.float64], token: int, count: int) -> Logprobs:
        return _logprobs(logits, token, count)

    def _edit(self, request: LlmRequest, logits: NDArray[np.float64]) -> None:
        if request.bias is not None:
            logits += request.bias
        self._penalise(request, logits)
        if request.bad_ids:
            logits[request.bad_ids] = NO_WAY
        if request.end_id >= 0 and self._counted_length(request) < request.min_tokens:
            logits[request.end_id] = NO_WAY
        if request.guide is not None:
            allowed = request.guide.allowed(request.generated)
            if not allowed:
                raise DeviceAssertError("CUDA error: device-side assert triggered")
            kept = logits[allowed]
            logits[:] = NO_WAY
            logits[allowed] = kept

    def _penalise(self, request: LlmRequest, logits: NDArray[np.float64]) -> None:
        """Ignore the penalties."""

    def _counted_length(self, request: LlmRequest) -> int:
        return len(request.prompt) + len(request.generated)

    def _uniform(self, request: LlmRequest) -> float:
        return self._generator.random()

    def _draw(self, weights: NDArray[np.float64], request: LlmRequest) -> int:
        sums = weights.cumsum()
        return int(np.searchsorted(sums, self._uniform(request) * sums[-1], side="right"))


class TRTLLMSampler(TorchSampler):
    """The C++ decoder's sampler: deprecated, but supports more parameters."""

    honours_min_p = True

    def _penalise(self, request: LlmRequest, logits: NDArray[np.float64]) -> None:
        repetition, presence, frequency = request.penalties
        if repetition != 1.0:
            seen = list(set(request.prompt) | set(request.generated))
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / repetition, values * repetition)
        if presence or frequency:
            for token, count in Counter(request.generated).items():
                logits[token] -= presence + frequency * count

    def _logprobs(self, logits: NDArray[np.float64], token: int, count: int) -> Logprobs:
        """Return only the chosen token's logprob, with rank 1 whatever its rank is."""
        return {token: (_logprobs(logits, token, count)[token][0], 1)}

    def _counted_length(self, request: LlmRequest) -> int:
        return len(request.generated)

    def _uniform(self, request: LlmRequest) -> float:
        mixed = ((request.state ^ (request.seed * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & _MASK
        return ((mixed ^ (mixed >> 31)) >> 11 & ((1 << 53) - 1)) / (1 << 53)


def _narrowed(
    request: LlmRequest, logits: NDArray[np.float64], min_p: float
) -> NDArray[np.float64]:
    """Return weights [vocab] of the tokens that remain after top_k, top_p and min_p."""
    weights: NDArray[np.float64] = np.exp(logits - logits.max())
    if 0 < request.top_k < len(weights):
        weights[weights < np.partition(weights, -request.top_k)[-request.top_k]] = 0.0
    if request.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        sums = weights[order].cumsum() / weights.sum()
        weights[order[1:][sums[:-1] >= request.top_p]] = 0.0
    if min_p:
        weights[weights < min_p * weights.max()] = 0.0
    return weights


def _logprobs(logits: NDArray[np.float64], token: int, count: int) -> Logprobs:
    """Return logprobs of the `count` likeliest tokens, and of the chosen one with its rank."""
    top = logits.max()
    normaliser = top + float(np.log(np.exp(logits - top).sum()))
    likeliest = np.argsort(-logits, kind="stable")[:count].tolist()
    found = {int(i): (float(logits[i] - normaliser), rank + 1) for rank, i in enumerate(likeliest)}
    if token not in found:
        rank = 1 + int((logits > logits[token]).sum())
        found[token] = (float(logits[token] - normaliser), rank)
    return found
