"""Ids of spans that were chosen before the spans exist.

The SDK asks its IdGenerator whenever it makes a span; this one answers what it was told just
before. Hence for one thread that makes all the spans of its provider.
"""

from opentelemetry.sdk.trace.id_generator import IdGenerator


class PlannedIds(IdGenerator):
    """Hands out the ids of the next span."""

    def __init__(self) -> None:
        self._trace_id = 0
        self._span_id = 0

    def plan(self, trace_id: int, span_id: int) -> None:
        """The next span is `span_id`, and of `trace_id` if it has no parent."""
        self._trace_id = trace_id
        self._span_id = span_id

    def generate_trace_id(self) -> int:
        """The planned one."""
        return self._trace_id

    def generate_span_id(self) -> int:
        """The planned one."""
        return self._span_id

    def is_trace_id_random(self) -> bool:
        """Ids of traces that begin here come from the system's source of randomness."""
        return True
