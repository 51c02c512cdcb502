"""How long outputs are, from those that ended.

Owns a running mean. Does not know requests, nor what its word is used for.
"""

import math


class OutputLengths:
    """A running mean of how many tokens finished requests generated.

    Plain mean of the first `memory` requests, exponential with weight 1/`memory` after that. The
    lengths seen are cut by `max_tokens` already, as those to come will be. ValueError names the
    parameter that is off.
    """

    __slots__ = ("_mean", "_memory", "_num_seen")

    def __init__(self, prior_tokens: float = 256.0, *, memory: int = 256) -> None:
        if not (math.isfinite(prior_tokens) and prior_tokens >= 1.0):
            raise ValueError(f"prior_tokens must be finite and at least 1, not {prior_tokens}")
        if memory < 1:
            raise ValueError(f"memory must be at least 1, not {memory}")
        self._mean = prior_tokens
        self._memory = memory
        # The prior weighs as much as one request.
        self._num_seen = 1

    @property
    def mean_tokens(self) -> float:
        """Tokens a request generates on average, at least 1."""
        return self._mean

    def observe(self, num_tokens: int) -> None:
        """A request finished by itself after this many tokens; not one that was cancelled."""
        self._num_seen = min(self._num_seen + 1, self._memory)
        self._mean += (max(num_tokens, 1) - self._mean) / self._num_seen

    def observe_cut(self, num_tokens: int) -> None:
        """A request was stopped for lack of time: memoryless, it had a mean still before it.

        Left out, those who end in time would make outputs look shorter than they are.
        """
        self.observe(num_tokens + round(self._mean))

    def expected(self, max_tokens: int) -> float:
        """Tokens a new request is expected to generate."""
        return min(self._mean, float(max_tokens))

    def expected_remaining(self, num_requests: int, num_tokens_to_limit: int) -> float:
        """Tokens that running requests together are expected to generate still.

        Memoryless outputs: a mean each, whatever they have generated, but never more than what is
        left to their limits, `num_tokens_to_limit` in sum.
        """
        return min(self._mean * num_requests, float(num_tokens_to_limit))
