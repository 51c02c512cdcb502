"""A request that may have killed an engine, as one process tells the next.

Owns the value. Who is suspected is the supervisor's to judge, what comes of it the engine's.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One output that was with an engine when it died. Raises ValueError naming the field.

    `num_trial_tokens`: so many tokens it has to get, tried alone of its kind, before it passes for
    harmless. `is_poison`: there is nothing left to try.
    """

    key: int
    num_trial_tokens: int = 2
    is_poison: bool = False

    def __post_init__(self) -> None:
        if self.key <= 0:
            raise ValueError(f"key must be positive, not {self.key}")
        if self.num_trial_tokens < 1:
            raise ValueError(f"num_trial_tokens must be at least 1, not {self.num_trial_tokens}")
