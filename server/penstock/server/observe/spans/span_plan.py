"""What a trace will say, before there are spans: a tree of plain values.

Owns the values. Times are seconds on the machine's monotonic clock; ids are those of the trace.
"""

from collections.abc import Mapping
from dataclasses import dataclass

AttributeValue = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened at one moment of a span."""

    name: str
    at_s: float


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """One span to be. `span_id`: 1..2**64-1. `is_error`: its status; there is never a description.

    `attributes` of a root are those known at its end: the sampler was given the others before.
    """

    name: str
    span_id: int
    start_s: float
    end_s: float
    attributes: Attributes
    is_error: bool = False
    events: tuple[SpanEvent, ...] = ()
    children: tuple["SpanPlan", ...] = ()
