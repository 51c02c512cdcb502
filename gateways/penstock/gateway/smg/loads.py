"""Computes the load of this worker; a gateway uses it for load balancing.

Its sources are the engine's status board (in shared memory) and the latest requests of this front
process. The rate of output tokens is the difference between two samples of their count, divided by
the time between them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.scheduler.executor import ExecutorInfo
from penstock.server.front.events import Usage
from penstock.server.ipc.board import NO_LOAD, BoardView, LoadState

_WINDOW_S: Final = 10.0
_MIN_SPAN_S: Final = 1.0
"""Minimum time that a rate covers, and minimum interval of the samples, seconds.

A rate covers the time since the latest sample that is at least `_WINDOW_S` old. If all samples are
newer, it covers the time since the oldest one. If that time is too short, the rate is 0."""
_MAX_REQUESTS: Final = 256
"""Number of latest requests over which the share of cached tokens is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The current load of the engine.

    `num_used_tokens` and `num_total_tokens` are the part of the KV cache that requests use and the
    size of the cache, in tokens. `output_tokens_per_s` is the rate over about the last ten seconds,
    or longer if the load is queried less often. `cache_hit_share` is the share of prompt tokens
    that were found in the KV cache, for the latest requests of this front process.
    """

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
        """The share of the KV cache that requests use, from 0 to 1; 0 if there is no KV cache."""
        return self.num_used_tokens / self.num_total_tokens if self.num_total_tokens else 0.0


class LoadReport:
    """Computes the load of the engine from its status board and from the latest requests of this
    front.

    `board` reads the engine's status board. If it is None, the engine publishes no load, and the
    figures from the board are reported as 0.
    """

    def __init__(self, board: BoardView | None, clock: Callable[[], float]) -> None:
        self._board = board
        self._clock = clock
        self._samples: deque[tuple[float, int, int]] = deque()
        self._usages: deque[Usage] = deque(maxlen=_MAX_REQUESTS)

    def record_usage(self, usage: Usage) -> None:
        """Record the usage of a request that ended without an error."""
        self._usages.append(usage)

    def load(self, info: ExecutorInfo) -> EngineLoad:
        """Return the current load of the engine. `info` has the engine's capacity. Each call may
        add a sample for the rate of output tokens."""
        state = NO_LOAD if self._board is None else self._board.load
        return EngineLoad(
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            num_waiting_tokens=state.num_waiting_tokens,
            num_used_tokens=state.num_used_blocks * info.block_size,
            num_total_tokens=info.num_blocks * info.block_size,
            max_num_running=info.max_num_seqs,
            output_tokens_per_s=self._output_rate(state),
            cache_hit_share=self._hit_share(),
        )

    def _output_rate(self, state: LoadState) -> float:
        now_s = self._clock()
        samples = self._samples
        if samples and samples[-1][1] != state.epoch:
            samples.clear()  # Another engine starts to count from 0.
        while len(samples) > 1 and samples[1][0] <= now_s - _WINDOW_S:
            samples.popleft()
        speed = 0.0
        if samples and now_s - samples[0][0] >= _MIN_SPAN_S:
            began_s, _, num_before = samples[0]
            speed = (state.num_output_tokens - num_before) / (now_s - began_s)
        if not samples or now_s - samples[-1][0] >= _MIN_SPAN_S:
            samples.append((now_s, state.epoch, state.num_output_tokens))
        return speed

    def _hit_share(self) -> float:
        num_tokens = sum(usage.num_prompt_tokens for usage in self._usages)
        num_cached = sum(usage.num_cached_prompt_tokens for usage in self._usages)
        return num_cached / num_tokens if num_tokens else 0.0
