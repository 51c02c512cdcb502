"""Records the requests of a run in bounded memory.

TTFT and the total time start when the request was due, not when it was sent, so that a stalled
client or server does not hide the wait of later requests (coordinated omission). Times are
passed in.
"""

from collections import Counter
from dataclasses import dataclass

import msgspec

from penstock.client.events import Finished, FinishReason
from penstock.tools.bench.latency_histogram import LatencyHistogram
from penstock.tools.bench.plan import LoadPlan
from penstock.tools.targets import SLOW_GAP_SHARE, Targets

HISTOGRAMS = ("ttft", "itl", "tpot", "total", "queue", "lateness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The measured period, `start_s` <= t < `end_s`, in seconds since the start of the run."""

    start_s: float
    end_s: float

    @classmethod
    def from_plan(cls, plan: LoadPlan) -> "Window":
        """Return the window of a plan: from the end of the warm-up to the end of sending."""
        return cls(start_s=plan.start_s, end_s=plan.end_s)

    def holds(self, at_s: float) -> bool:
        """Return whether the window contains a time."""
        return self.start_s <= at_s < self.end_s


class LoadRecorder(msgspec.Struct, kw_only=True):
    """Counts the requests of a run and measures their latencies. Times are seconds since the run's
    start.

    Only requests due in the window are counted and measured, whenever they end. Only tokens of
    completed requests are counted. `errors`: numbers of failed requests by gRPC status and error
    reason. `last_due_s`, `last_completed_s`: the latest times at which a request was due, and
    completed.
    """

    window: Window
    targets: Targets
    ttft: LatencyHistogram = msgspec.field(default_factory=LatencyHistogram)
    itl: LatencyHistogram = msgspec.field(default_factory=LatencyHistogram)
    tpot: LatencyHistogram = msgspec.field(default_factory=LatencyHistogram)
    total: LatencyHistogram = msgspec.field(default_factory=LatencyHistogram)
    queue: LatencyHistogram = msgspec.field(default_factory=LatencyHistogram)
    lateness: LatencyHistogram = msgspec.field(default_factory=LatencyHistogram)
    errors: dict[tuple[str, str], int] = {}
    num_due: int = 0
    num_completed: int = 0
    num_good: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    num_unfinished: int = 0
    num_short: int = 0
    num_preemptions: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    last_due_s: float = 0.0
    last_completed_s: float = 0.0

    @classmethod
    def from_plan(cls, plan: LoadPlan) -> "LoadRecorder":
        """Return an empty recorder for a run of a plan."""
        return cls(window=Window.from_plan(plan), targets=plan.targets)

    def begin(self, due_s: float, sent_s: float, num_wanted_tokens: int) -> "OpenRequest":
        """Return the record of a request that was due at `due_s`, is sent at `sent_s` and asks for
        `num_wanted_tokens` tokens.
        """
        is_counted = self._is_due(due_s)
        if is_counted:
            self.lateness.record(sent_s - due_s)
        return OpenRequest(self, due_s, num_wanted_tokens, is_counted=is_counted)

    def drop(self, due_s: float) -> None:
        """Record that the request due at `due_s` is not sent."""
        self.num_dropped += self._is_due(due_s)

    def merge(self, other: "LoadRecorder") -> None:
        """Add the counts of another recorder of the same run."""
        for name in HISTOGRAMS:
            getattr(self, name).merge(getattr(other, name))
        for name in self.__struct_fields__:
            if name.startswith("num_"):
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.errors = dict(Counter(self.errors) + Counter(other.errors))
        self.last_due_s = max(self.last_due_s, other.last_due_s)
        self.last_completed_s = max(self.last_completed_s, other.last_completed_s)

    def _is_due(self, due_s: float) -> bool:
        """Count a request if it is due in the window; return whether it is."""
        if not self.window.holds(due_s):
            return False
        self.num_due += 1
        self.last_due_s = max(self.last_due_s, due_s)
        return True


class OpenRequest:
    """Records the tokens and the end of one open request in its LoadRecorder. Times are seconds
    since the run's start.
    """

    __slots__ = (
        "_due_s",
        "_first_s",
        "_is_counted",
        "_last_s",
        "_num_gaps",
        "_num_slow_gaps",
        "_num_tokens",
        "_num_wanted_tokens",
        "_recorder",
    )

    def __init__(
        self, recorder: LoadRecorder, due_s: float, num_wanted_tokens: int, *, is_counted: bool
    ) -> None:
        self._recorder = recorder
        self._due_s = due_s
        self._num_wanted_tokens = num_wanted_tokens
        self._is_counted = is_counted
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_tokens = 0
        self._num_gaps = 0
        self._num_slow_gaps = 0

    def tokens(self, now_s: float, num_tokens: int) -> None:
        """Record a message with `num_tokens` new tokens; 0 has no effect."""
        if not num_tokens:
            return
        recorder = self._recorder
        self._num_tokens += num_tokens
        if self._first_s is None:
            self._first_s = now_s
            if self._is_counted:
                recorder.ttft.record(now_s - self._due_s)
        else:
            gap_s = now_s - self._last_s
            self._num_gaps += 1
            self._num_slow_gaps += gap_s > recorder.targets.itl_s
            if self._is_counted:
                recorder.itl.record(gap_s)
        self._last_s = now_s

    def finished(self, now_s: float, end: Finished) -> None:
        """Record that the request completed."""
        if not self._is_counted:
            return
        recorder = self._recorder
        recorder.num_completed += 1
        recorder.num_good += self._is_good()
        recorder.num_output_tokens += self._num_tokens
        recorder.num_prompt_tokens += end.usage.num_prompt_tokens
        recorder.num_cached_prompt_tokens += end.usage.num_cached_prompt_tokens
        recorder.num_short += self._is_short(end)
        recorder.num_preemptions += end.num_preemptions
        recorder.last_completed_s = max(recorder.last_completed_s, now_s)
        recorder.total.record(now_s - self._due_s)
        recorder.queue.record(end.timings.queue_s)
        if self._first_s is not None and self._num_tokens > 1:
            recorder.tpot.record((self._last_s - self._first_s) / (self._num_tokens - 1))

    def failed(self, status: str, reason: str) -> None:
        """Record that the request failed with this gRPC status and error reason ("" if there is
        none).
        """
        if self._is_counted:
            recorder = self._recorder
            recorder.num_failed += 1
            recorder.errors[status, reason] = recorder.errors.get((status, reason), 0) + 1

    def abandoned(self) -> None:
        """Record that the request was still open when the run ended."""
        self._recorder.num_unfinished += self._is_counted

    def _is_good(self) -> bool:
        if self._first_s is None:
            return False
        is_in_time = self._first_s - self._due_s <= self._recorder.targets.ttft_s
        return is_in_time and self._num_slow_gaps <= SLOW_GAP_SHARE * self._num_gaps

    def _is_short(self, end: Finished) -> bool:
        """Return whether the output had another number of tokens than requested, or another finish
        reason than LENGTH; such requests change the load.
        """
        is_whole = self._num_tokens == self._num_wanted_tokens
        return not is_whole or any(
            output.finish_reason is not FinishReason.LENGTH for output in end.outputs
        )
