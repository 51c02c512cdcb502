"""Records one request of the demo as its client sees it, with its states, text and timings.

Does no I/O: events and times are arguments.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.server.cli.report import finish_summary, printable, rate, table_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.client import Event, Finished, GenerationOptions, PenstockError

_EXPECTED_STATES = ("PENDING", "PROCESSING", "COMPLETED")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """A request to send. `name`: its label in the output."""

    name: str
    prompt: str
    options: "GenerationOptions"


@dataclass(slots=True)
class DemoRun:
    """The progress of one request. `states`: name of each state and when it began, in seconds after
    submission.
    """

    request: DemoRequest
    states: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    text: str = ""
    num_tokens: int = 0
    finished: "Finished | None" = None
    error: str = ""

    @property
    def state(self) -> str:
        """The latest state of the request; "SUBMITTED" before the first one is received."""
        return self.states[-1][0] if self.states else "SUBMITTED"

    @property
    def is_sound(self) -> bool:
        """Whether the request completed, and its states began with PENDING, included PROCESSING and
        ended with COMPLETED.
        """
        names = [name for name, _ in self.states]
        is_whole = names[:1] == ["PENDING"] and names[-1:] == ["COMPLETED"]
        return self.finished is not None and is_whole and "PROCESSING" in names

    @property
    def problem(self) -> str:
        """The error, or else the states seen instead of the expected ones; empty if `is_sound`."""
        if self.is_sound:
            return ""
        seen = ", ".join(name for name, _ in self.states) or "none"
        return self.error or f"states seen: {seen}; expected {', '.join(_EXPECTED_STATES)}"

    def on_event(self, event: "Event", at_s: float) -> str:
        """Record an event received `at_s` seconds after submission; return its text without control
        characters, "" if it has none.
        """
        from penstock.client import Accepted, Finished, Progress, Tokens

        if isinstance(event, Accepted):
            self._enter("PENDING", at_s)
        elif isinstance(event, Progress):
            self._enter(event.state.name, at_s)
        elif isinstance(event, Tokens):
            text = printable(event.text)
            self.text += text
            self.num_tokens += event.num_tokens
            return text
        elif isinstance(event, Finished):
            self.finished = event
            self._enter("COMPLETED", at_s)
        return ""

    def on_error(self, error: "PenstockError", at_s: float) -> None:
        """Record the error that ended the request."""
        self.error = str(error)
        self._enter("ERROR", at_s)

    def _enter(self, state: str, at_s: float) -> None:
        if self.state != state:
            self.states.append((state, at_s))


def final_table(runs: "Sequence[DemoRun]") -> list[str]:
    """Format a table with the states, their times and the server's timings, one row per request."""
    header = ("REQUEST", "STATES (since ms)", "QUEUE ms", "TTFT ms", "TOKENS", "TOKENS/s", "FINISH")
    return table_lines([header, *(_row(run) for run in runs)])


def _row(run: DemoRun) -> tuple[str, ...]:
    history = " > ".join(f"{name} {at_s * 1e3:.0f}" for name, at_s in run.states)
    finished = run.finished
    if finished is None:
        return (run.request.name, history, "-", "-", str(run.num_tokens), "-", "-")
    timings = finished.timings
    return (
        run.request.name,
        history,
        f"{timings.queue_s * 1e3:.1f}",
        "-" if timings.ttft_s is None else f"{timings.ttft_s * 1e3:.1f}",
        str(finished.usage.num_completion_tokens),
        rate(finished.tokens_per_s),
        finish_summary(finished),
    )
