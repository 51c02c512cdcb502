"""A request that may have crashed an engine; the supervisor passes it to the next engine.

Owns the value. The supervisor decides which requests are suspected, the engine what to do with
them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectedRequest:
    """One output that was in an engine when it died. Raises ValueError naming the field.

    `num_probation_tokens`: how many tokens it must generate alone before it counts as harmless.
    `is_poison`: it is refused.
    """

    key: int
    num_probation_tokens: int = 2
    is_poison: bool = False

    def __post_init__(self) -> None:
        if self.key <= 0:
            raise ValueError(f"key must be positive, not {self.key}")
        if self.num_probation_tokens < 1:
            raise ValueError(
                f"num_probation_tokens must be at least 1, not {self.num_probation_tokens}"
            )
