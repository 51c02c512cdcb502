"""The content of a step, and its duration.

Owns the one value that the cost model is learned from. Does not know who measures or who learns.
"""

from dataclasses import dataclass

from penstock.scheduler.batch import Batch


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
