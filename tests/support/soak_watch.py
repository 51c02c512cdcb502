"""What a soak looks at once a second: the account of blocks, memory, the log.

Owns the looking and what it found. Does nothing to the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc.aio
import psutil

from penstock.client import ModelState, OperationsClient, PenstockError, ServerStats
from support.service import Service

HARD_ZERO = ("Traceback", "was never retrieved", "Failed to detach", "leak", "Segmentation fault")
"""What no line of a log may hold, whatever is done to the service."""
_ALLOWED = ("flight",)
MAX_LOG_LINES = 2000


@dataclass(slots=True)
class Memory:
    """Resident bytes of one process, one sample a second; times are monotonic."""

    role: str
    pid: int
    times_s: list[float] = field(default_factory=list[float])
    samples_bytes: list[int] = field(default_factory=list[int])

    @property
    def seconds(self) -> float:
        return self.times_s[-1] - self.times_s[0] if self.times_s else 0.0

    def growth_bytes(self, warm_up_s: float) -> int:
        """From the end of its first `warm_up_s` to its last sample; 0 if it lived no longer."""
        for time_s, sample in zip(self.times_s, self.samples_bytes, strict=True):
            if time_s - self.times_s[0] >= warm_up_s:
                return self.samples_bytes[-1] - sample
        return 0


class Watch:
    """Looks at a service until it is reported to stop. `faults`: what must not have been seen."""

    def __init__(self, service: Service, operations: OperationsClient) -> None:
        self.service = service
        self.faults: list[str] = []
        self.memory: dict[int, Memory] = {}
        self._processes = [("supervisor", psutil.Process(service.process.pid))]
        self.num_looks = 0
        self.num_unanswered = 0
        self.most_used_blocks = 0
        self.last: ServerStats | None = None
        self._operations = operations

    def alive(self, role: str) -> list[psutil.Process]:
        """The processes of a role that are there, oldest first."""
        self._hear_of_processes()
        return [process for known, process in self._processes if known == role]

    async def run(self) -> None:
        """Once a second, for ever."""
        while True:
            self._hear_of_processes()
            await self.look()
            self._weigh()
            self.read_log()
            await asyncio.sleep(1.0)

    async def look(self) -> ServerStats | None:
        """The figures of now, None where no client answers; their sums are checked."""
        try:
            async with asyncio.timeout(5.0):
                stats = await self._operations.get_stats()
        except (PenstockError, grpc.aio.AioRpcError, TimeoutError):
            self.num_unanswered += 1
            return None
        self.num_looks += 1
        self.last = stats
        self.faults += faults_of(stats)
        for model in stats.models:
            self.most_used_blocks = max(self.most_used_blocks, model.cache.num_used_blocks)
        return stats

    async def until(self, is_so: Callable[[ServerStats], bool], seconds: float) -> bool:
        """Look until then; False when it did not come to that in time."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            stats = await self.look()
            if stats is not None and is_so(stats):
                return True
            await asyncio.sleep(0.2)
        return False

    def read_log(self) -> None:
        """Search the lines that are new, and forget the oldest: a soak is longer than a test."""
        lines = self.service.stderr
        for line in lines[self._num_read :]:
            is_allowed = any(word in line for word in _ALLOWED)
            if not is_allowed and any(word in line for word in HARD_ZERO):
                self.faults.append(f"in the log: {line.strip()[:300]}")
        self._num_read = len(lines)
        if len(lines) > MAX_LOG_LINES:
            del lines[:-100]
            self._num_read = len(lines)

    _num_read = 0

    def _hear_of_processes(self) -> None:
        for role, pids in list(self.service.pids.items()):
            while not pids.empty():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._processes.append((role, psutil.Process(pids.get_nowait())))
        # By identity, not by number: the number of a dead one may be a unauthenticated caller's by
        # now.
        self._processes = [pair for pair in self._processes if _is_there(pair[1])]

    def _weigh(self) -> None:
        for role, process in self._processes:
            try:
                size = process.memory_info().rss
            except psutil.Error:
                continue
            if size:  # a zombie has none
                memory = self.memory.setdefault(process.pid, Memory(role, process.pid))
                memory.times_s.append(time.monotonic())
                memory.samples_bytes.append(size)


def faults_of(stats: ServerStats) -> Iterator[str]:
    """What the figures of one look cannot be."""
    for model in stats.models:
        cache = model.cache
        parts = cache.num_used_blocks + cache.num_cached_blocks + cache.num_free_blocks
        if cache.num_total_blocks and parts != cache.num_total_blocks:
            yield f"{parts} blocks of {cache.num_total_blocks}"
        if model.num_processing > model.max_num_seqs > 0:
            yield f"{model.num_processing} run on {model.max_num_seqs} slots"
        if not model.num_processing and not model.num_pending and cache.num_used_blocks > 0:
            yield f"nobody runs, {cache.num_used_blocks} blocks are used"


def has_engine(stats: ServerStats) -> bool:
    """A client is there to compute."""
    return bool(stats.models) and all(model.state is ModelState.READY for model in stats.models)


def is_quiet(stats: ServerStats) -> bool:
    """No client lives, nothing is used, nothing streams."""
    return not any(
        model.num_processing or model.num_pending or model.cache.num_used_blocks
        for model in stats.models
    ) and not any(front.num_live_requests for front in stats.fronts)


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
