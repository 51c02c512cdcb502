"""The load of this worker, for a gateway's load balancing.

Calculates it from the engine's board: the speed is the difference of two readings.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.scheduler.executor import ExecutorInfo
from penstock.server.front.events import Usage
from penstock.server.link.board import BoardView, LoadState

_WINDOW_S: Final = 10.0
_MIN_SPAN_S: Final = 1.0
"""Rates cover at most `_WINDOW_S`; samples closer together than `_MIN_SPAN_S` are not kept."""
_MAX_REQUESTS: Final = 256
"""Number of latest requests over which the share of cached tokens is calculated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Current requests, tokens and shares; `output_tokens_per_s`: over the last seconds."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_used_tokens: int
    num_total_tokens: int
    max_num_running: int
    output_tokens_per_s: float
    cache_hit_share: float

    @property
    def usage(self) -> float:
        """Share of the KV cache that requests use."""
        return self.num_used_tokens / self.num_total_tokens if self.num_total_tokens else 0.0


class LoadReport:
    """Reports the engine's load. `show` None: the engine has no load report, and only this front's
    figures are reported.
    """

    def __init__(self, show: BoardView | None, clock: Callable[[], float]) -> None:
        self._show = show
        self._clock = clock
        self._looks: deque[tuple[float, int, int]] = deque()
        self._usages: deque[Usage] = deque(maxlen=_MAX_REQUESTS)

    def note(self, usage: Usage) -> None:
        """Record the usage of a request that ended without an error."""
        self._usages.append(usage)

    def load(self, info: ExecutorInfo) -> EngineLoad:
        """Return the current load of the engine of `info`."""
        state = LoadState(
            epoch=0,
            num_running=0,
            num_waiting=0,
            num_waiting_tokens=0,
            num_used_blocks=0,
            num_output_tokens=0,
        )
        if self._show is not None:
            state = self._show.load
        return EngineLoad(
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            num_waiting_tokens=state.num_waiting_tokens,
            num_used_tokens=state.num_used_blocks * info.block_size,
            num_total_tokens=info.num_blocks * info.block_size,
            max_num_running=info.max_num_seqs,
            output_tokens_per_s=self._speed(state),
            cache_hit_share=self._hit_share(),
        )

    def _speed(self, state: LoadState) -> float:
        now_s = self._clock()
        looks = self._looks
        if looks and looks[-1][1] != state.epoch:
            looks.clear()  # another engine counts from 0
        while len(looks) > 1 and looks[1][0] <= now_s - _WINDOW_S:
            looks.popleft()
        speed = 0.0
        if looks and now_s - looks[0][0] >= _MIN_SPAN_S:
            began_s, _, num_before = looks[0]
            speed = (state.num_output_tokens - num_before) / (now_s - began_s)
        if not looks or now_s - looks[-1][0] >= _MIN_SPAN_S:
            looks.append((now_s, state.epoch, state.num_output_tokens))
        return speed

    def _hit_share(self) -> float:
        num_tokens = sum(usage.num_prompt_tokens for usage in self._usages)
        num_cached = sum(usage.num_cached_prompt_tokens for usage in self._usages)
        return num_cached / num_tokens if num_tokens else 0.0
