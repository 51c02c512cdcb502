"""A self-paced executor (one that does its own batching) that a test scripts, without threads."""

import os
from typing import Any

import numpy as np

from penstock.scheduler.batch import Batch, SlotEnd, SlotFailure, StepResult
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.listener import EngineListener
from penstock.scheduler.request import Request
from support.core import FakeClock, make_info


def token_of(request_id: str, position: int) -> int:
    """Return the token, 500 to 899, at an absolute position of a request."""
    return 500 + (hash((request_id, position)) % 400)


class SelfPacedExecutor:
    """Returns the results that the test adds with `emit(key, count)`, `fail(key)`, `end(key, ...)`.

    `in_engine`: by key, the requests admitted by the scheduler and not yet released.
    """

    def __init__(self, info: ExecutorInfo) -> None:
        self.info = info
        self.in_engine: dict[int, Request] = {}
        self.admitted: list[int] = []
        self.batches: list[Batch] = []
        self._keys: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._num_emitted: dict[int, int] = {}
        self._updates: dict[int, list[int]] = {}
        self._failures: list[SlotFailure] = []
        self._ends: list[SlotEnd] = []
        self._cached: list[tuple[int, int]] = []
        self.ready_fd: int | None
        self.ready_fd, self._notify_fd = os.pipe()

    def emit(self, key: int, count: int = 1) -> None:
        request = self.in_engine[key]
        updates = self._updates.setdefault(self._slots[key], [])
        for _ in range(count):
            position = len(request.tokens) + self._num_emitted[key]
            self._num_emitted[key] += 1
            updates.append(token_of(request.spec.request_id, position))

    def emit_ids(self, key: int, *ids: int) -> None:
        self._num_emitted[key] += len(ids)
        self._updates.setdefault(self._slots[key], []).extend(ids)

    def fail(self, key: int, **flags: bool) -> None:
        slot = self._slots[key]
        self._updates.pop(slot, None)
        self._failures.append(SlotFailure(slot=slot, detail="scripted", **flags))

    def end(self, key: int, **how: object) -> None:
        self._ends.append(SlotEnd(slot=self._slots[key], **how))  # type: ignore[arg-type]

    def find_prefix(self, key: int, num_cached: int) -> None:
        self._cached.append((self._slots[key], num_cached))

    def launch(self, batch: Batch) -> None:
        self.batches.append(batch)
        for slot in batch.released:
            key = self._keys.pop(slot)
            del self.in_engine[key], self._num_emitted[key], self._slots[key]
            self._updates.pop(slot, None)
        for request in batch.admitted:
            self._keys[request.slot] = request.spec.key
            self._slots[request.spec.key] = request.slot
            self.in_engine[request.spec.key] = request
            self._num_emitted[request.spec.key] = 0
            self.admitted.append(request.spec.key)

    def collect(self) -> StepResult:
        updates, self._updates = self._updates, {}
        failures, self._failures = tuple(self._failures), []
        ends, self._ends = tuple(self._ends), []
        cached, self._cached = tuple(self._cached), []
        return StepResult(
            slots=np.array(list(updates), dtype=np.int32),
            tokens=np.array([token for ids in updates.values() for token in ids], dtype=np.int32),
            counts=np.array([len(ids) for ids in updates.values()], dtype=np.int32),
            failures=failures,
            ends=ends,
            num_cached=cached,
        )

    def close(self) -> None:
        assert self.ready_fd is not None
        os.close(self.ready_fd)
        os.close(self._notify_fd)


def make_self_paced(
    *,
    budget: int = 16,
    clock: FakeClock | None = None,
    listener: EngineListener | None = None,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    **settings: Any,
) -> tuple[Engine, SelfPacedExecutor]:
    info = make_info(num_blocks=num_blocks, max_num_seqs=max_num_seqs, is_self_paced=True)
    executor = SelfPacedExecutor(info)
    config = SchedulerConfig(max_num_batched_tokens=budget, **settings)
    return Engine(executor, config, clock or FakeClock(), listener), executor
