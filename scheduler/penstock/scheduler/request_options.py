"""Options of a request beyond sampling: constraints, adapters, cache retention.

Owns the values. An executor's features show which it supports; the front refuses the others, so the
scheduler passes these on unread, except for retention, which it applies itself where the blocks are
its own (block_pool.py).
"""

import enum
import math
from dataclasses import dataclass
from typing import Final


class ConstraintKind(enum.IntEnum):
    """The languages of a constraint."""

    JSON_SCHEMA = 1
    REGEX = 2
    GRAMMAR = 3
    CHOICE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The format an output must have.

    `texts`: the schema, the pattern or the EBNF grammar (start symbol `root`), one text; for CHOICE
    the texts of which the output is one.
    """

    kind: ConstraintKind
    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.texts or not all(self.texts):
            raise ValueError("constraint must have texts, none of them empty")
        if self.kind is not ConstraintKind.CHOICE and len(self.texts) != 1:
            raise ValueError(f"constraint of kind {self.kind.name} must have one text")


DEFAULT_RETENTION_PRIORITY: Final = 35
"""Of blocks without a retention, as in TensorRT-LLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRetention:
    """The eviction priority of a request's cached blocks: lower `priority` (0 to 100) is evicted
    earlier.

    `duration_s`: how long the priority lasts after the request, seconds; infinite for no end.
    """

    priority: int = DEFAULT_RETENTION_PRIORITY
    duration_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 100:
            raise ValueError("retention priority must be in 0 .. 100")
        if not self.duration_s > 0:
            raise ValueError("retention duration_s must be positive")
