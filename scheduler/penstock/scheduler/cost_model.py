"""How long a step takes: a linear function of what is in it.

Owns the formula. Does not know where the coefficients come from nor
what the time is spent on.
"""

from dataclasses import dataclass
from typing import Protocol

from penstock.scheduler.setting import check, setting

MAX_PRICE_S = 3600.0
"""Of anything in a step; more is a mistake in the units."""


class StepPrices(Protocol):
    """The four prices of a step, wherever they come from: fixed, or fitted while it runs.

    All are seconds, finite and not negative; `CostModel` says what each is the price of.
    """

    @property
    def step_s(self) -> float:
        """Price of a step, whatever it holds."""
        ...

    @property
    def prefill_token_s(self) -> float:
        """Price of each prefill token computed."""
        ...

    @property
    def decode_slot_s(self) -> float:
        """Price of each decode row."""
        ...

    @property
    def context_token_s(self) -> float:
        """Price of each token of context that a row attends to."""
        ...

    def step_time_s(
        self, *, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int
    ) -> float:
        """Seconds that a step takes: `num_context_tokens` is the sum over all rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of one step: a constant plus a price for each kind of work in it.

    `step_s`: whatever the step holds. `prefill_token_s`: each prefill token computed.
    `decode_slot_s`: each decode row. `context_token_s`: each token of context that a row attends
    to (its position at the end of the step). SettingError names the field that is out of bounds.
    """

    step_s: float = setting(0.004, at_least=0, at_most=MAX_PRICE_S)
    prefill_token_s: float = setting(20e-6, at_least=0, at_most=MAX_PRICE_S)
    decode_slot_s: float = setting(50e-6, at_least=0, at_most=MAX_PRICE_S)
    context_token_s: float = setting(20e-9, at_least=0, at_most=MAX_PRICE_S)

    def __post_init__(self) -> None:
        check(self)

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
