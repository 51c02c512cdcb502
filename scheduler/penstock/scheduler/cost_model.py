"""The cost model of a step, a linear function of its content, and the measured step it is learned
from.

Owns the formula. Does not know where the coefficients come from nor how the time is spent.
"""

from dataclasses import dataclass
from typing import Protocol

from penstock.scheduler.batch import Batch
from penstock.scheduler.setting import check, setting

MAX_PRICE_S = 3600.0
"""Upper bound of a coefficient; more is a mistake in the units."""


class StepPrices(Protocol):
    """The four coefficients of the cost model: fixed, or fitted at run time.

    All are seconds, finite and not negative; see `CostModel`.
    """

    @property
    def step_s(self) -> float:
        """Cost of a step, whatever its content."""
        ...

    @property
    def prefill_token_s(self) -> float:
        """Cost of each prefill token computed."""
        ...

    @property
    def decode_slot_s(self) -> float:
        """Cost of each decode row."""
        ...

    @property
    def context_token_s(self) -> float:
        """Cost of each token of context that a row attends to."""
        ...

    def step_time_s(
        self, *, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int
    ) -> float:
        """Seconds of a step: `num_context_tokens` is the sum over all rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of one step: a constant plus a cost for each kind of work in it.

    `step_s`: for any step. `prefill_token_s`: each prefill token computed. `decode_slot_s`: each
    decode row. `context_token_s`: each token of context that a row attends to (its position at the
    end of the step). SettingError names the field that is out of bounds.
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
        """Seconds of a step: `num_context_tokens` is the sum over all rows."""
        return (
            self.step_s
            + self.prefill_token_s * num_prefill_tokens
            + self.decode_slot_s * num_decodes
            + self.context_token_s * num_context_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasure:
    """One step: counts as in `CostModel`, and the seconds from its start to the next one's.

    A step that was launched behind others counts from the end of the one before.
    """

    num_prefill_tokens: int
    num_decodes: int
    num_context_tokens: int
    seconds: float


def measure_of(batch: Batch, seconds: float) -> StepMeasure:
    """The content of a batch, with its duration."""
    num_prefill_tokens = int(batch.num_tokens[batch.num_decodes :].sum())
    return StepMeasure(
        num_prefill_tokens=num_prefill_tokens,
        num_decodes=batch.num_decodes,
        num_context_tokens=int(batch.starts.sum()) + batch.num_decodes + num_prefill_tokens,
        seconds=seconds,
    )
