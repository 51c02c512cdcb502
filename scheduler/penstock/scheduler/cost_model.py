"""How long a step takes: a linear function of what is in it.

Owns the formula and its inverse for one budget. Does not know where the coefficients come from nor
what the time is spent on.
"""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of one step: a constant plus a price for each kind of work in it.

    `step_s`: whatever the step holds. `prefill_token_s`: each prefill token computed.
    `decode_slot_s`: each decode row. `context_token_s`: each token of context that a row attends
    to (its position at the end of the step). All are finite and not negative; ValueError names the
    field otherwise.
    """

    step_s: float = 0.004
    prefill_token_s: float = 20e-6
    decode_slot_s: float = 50e-6
    context_token_s: float = 20e-9

    def __post_init__(self) -> None:
        for field in fields(self):
            value: float = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{field.name} must be finite and not negative, not {value}")

    def step_time_s(
        self, *, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int
    ) -> float:
        """Seconds that a step takes: `num_context_tokens` is the sum over all rows."""
        return (
            self.step_s
            + self.prefill_token_s * num_prefill_tokens
            + self.decode_slot_s * num_decodes
            + self.context_token_s * num_context_tokens
        )

    def max_prefill_tokens(
        self, *, budget_s: float, num_decodes: int, num_context_tokens: int, limit: int
    ) -> int:
        """The most prefill tokens, at most `limit`, that fit in a step of `budget_s` seconds.

        The context is what the step holds without those tokens: each of them adds its own price
        and one token of context. 0 when the step is over the budget without any.
        """
        left_s = budget_s - self.step_time_s(
            num_prefill_tokens=0, num_decodes=num_decodes, num_context_tokens=num_context_tokens
        )
        if left_s < 0.0:
            return 0
        price_s = self.prefill_token_s + self.context_token_s
        if price_s * limit <= left_s:
            return limit
        return int(left_s / price_s)
