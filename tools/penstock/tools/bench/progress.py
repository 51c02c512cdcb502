"""The progress bar of `penstock bench`.

Owns the bar. Does not measure.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.tools.bench.plan import LoadPlan
    from penstock.tools.bench.worker import WorkerProgress

_WIDTH = 24


class BenchProgress:
    """One line on stderr that is overwritten on a terminal; no output elsewhere."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown and sys.stderr.isatty()
        self._has_shown = False

    def show(
        self, heading: str, plan: "LoadPlan", now_s: float, progress: "WorkerProgress"
    ) -> None:
        """Overwrite the line."""
        if not self._is_shown:
            return
        print(
            f"\r\x1b[K{bar_text(heading, plan, now_s, progress)}",
            end="",
            file=sys.stderr,
            flush=True,
        )
        self._has_shown = True

    def end(self) -> None:
        """End the line."""
        if self._has_shown:
            print(file=sys.stderr, flush=True)
            self._has_shown = False


def bar_text(heading: str, plan: "LoadPlan", now_s: float, progress: "WorkerProgress") -> str:
    """The line. `heading`: which of several runs it is."""
    now_s = max(0.0, now_s)
    share = min(1.0, now_s / plan.end_s)
    bar = "#" * round(share * _WIDTH)
    num_open = progress.num_sent - progress.num_ended
    if now_s < plan.warm_up_s:
        phase = "warm-up"
    elif now_s < plan.end_s:
        phase = "measuring"
    else:
        phase = "draining"
    return (
        f"{heading}[{bar:.<{_WIDTH}}] {now_s:.0f}/{plan.end_s:g} s {phase}:"
        f" {progress.num_sent:,} sent, {num_open:,} open, {progress.num_failed:,} failed"
    )
