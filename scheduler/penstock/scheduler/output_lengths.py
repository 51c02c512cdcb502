"""How long outputs are, from those that ended.

Owns the estimate. Does not know requests, nor what its word is used for.
"""

import math


class OutputLengths:
    """How many tokens requests generate before they end by themselves, and so before a limit.

    Outputs are taken to be memoryless: the mean is all tokens generated over all ends, where who
    reached its limit, or ran out of time, adds tokens and no end (the maximum likelihood for
    censored lifetimes: Cox and Oakes, *Analysis of Survival Data*, chapter 3). What was seen
    `memory` requests ago counts for 1/e. ValueError names the parameter that is off.
    """

    __slots__ = ("_keep", "_num_ends", "_num_tokens")

    def __init__(self, prior_tokens: float = 256.0, *, memory: int = 256) -> None:
        if not (math.isfinite(prior_tokens) and prior_tokens >= 1.0):
            raise ValueError(f"prior_tokens must be finite and at least 1, not {prior_tokens}")
        if memory < 1:
            raise ValueError(f"memory must be at least 1, not {memory}")
        # The prior weighs as much as one request.
        self._num_tokens = prior_tokens
        self._num_ends = 1.0
        self._keep = 1.0 - 1.0 / memory

    @property
    def mean_tokens(self) -> float:
        """Tokens a request without a limit would generate on average, at least 1."""
        return max(self._num_tokens / self._num_ends, 1.0)

    def observe(self, num_tokens: int, *, is_cut: bool = False) -> None:
        """A request ended after this many tokens; `is_cut`: because it had to, not by itself."""
        self._num_tokens = self._keep * self._num_tokens + max(num_tokens, 1)
        # Never none: where nobody ends by itself the mean grows, and every limit is reached.
        self._num_ends = max(self._keep * self._num_ends + (not is_cut), 1e-6)

    def expected(self, max_tokens: float) -> float:
        """Tokens a new request is expected to generate, cut at its limit."""
        mean = self.mean_tokens
        return -math.expm1(-max_tokens / mean) * mean

    def expected_remaining(self, num_requests: int, num_tokens_to_limit: int) -> float:
        """Tokens that running requests together are expected to generate still.

        Each what a new one would, whatever it has generated; `num_tokens_to_limit`: what is left to
        their limits, in sum.
        """
        if not num_requests:
            return 0.0
        return num_requests * self.expected(num_tokens_to_limit / num_requests)
