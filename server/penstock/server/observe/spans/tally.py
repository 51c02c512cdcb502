"""Counts of what became of traces and spans, added to by several threads."""

import threading

NAMES: tuple[str, ...] = (
    "traces_kept",
    "traces_sampled_out",
    "traces_dropped_queue_full",
    "traces_dropped_closing",
    "traces_dropped_unwritable",
    "spans_exported",
    "spans_dropped_export",
    "spans_dropped_closing",
)
"""All counts; they only grow. `_dropped_` is followed by the reason."""


class Tally:
    """The counts, all there from the start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(NAMES, 0)

    def add(self, name: str, num: int) -> None:
        """Raises KeyError for a name that is not in `NAMES`."""
        with self._lock:
            self._counts[name] += num

    def counts(self) -> dict[str, int]:
        """All of them, as of one moment."""
        with self._lock:
            return dict(self._counts)
