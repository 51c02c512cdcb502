"""Computes the metrics of the engine's steps, and the gauges of its batch, queue and KV cache.

Reads arrays of `flight.layout.STEP` rows and the totals of the flight recorder. An idle engine runs
no steps, so its load is read from its status board, if there is one: shared memory to which the
engine writes its load. An engine is identified by its epoch, the number of the engine start from 1.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.events import WaitReason
from penstock.server.ipc.board import NO_LOAD, LoadState
from penstock.server.ipc.frames import EngineHello
from penstock.server.observe.metrics import catalogue
from penstock.server.observe.metrics.catalogue import MetricSpec
from penstock.server.observe.metrics.tables import MetricTables

_TOTALS: Final[Mapping[str, MetricSpec]] = {
    "num_output_tokens": catalogue.GENERATION_TOKENS,
    "num_admitted": catalogue.ADMISSIONS,
    "num_preempted": catalogue.PREEMPTIONS,
}
"""The totals of the recording that are exported as metrics, by name in `flight.layout.TOTALS`."""
_IN_ROWS: Final[Mapping[str, str]] = {
    "num_output_tokens": "num_tokens",
    "num_admitted": "num_admitted",
    "num_preempted": "num_preempted",
}
_STATES: Final = ("used", "cached", "free")


class StepMetrics:
    """Updates the metrics of steps, load and KV cache in `tables`."""

    def __init__(self, tables: MetricTables) -> None:
        self._tables = tables
        self._epoch = 0
        self._last: NDArray[Any] | None = None  # The last step of the newest engine.
        self._is_up = False
        # Each count of this epoch: from its rows, and from the totals of its recording.
        self._from_rows: dict[str, int] = dict.fromkeys(_TOTALS, 0)
        self._from_totals: dict[str, int] = {}
        self._cuts = (0, 0)
        for state in _STATES:
            tables.gauge(catalogue.KV_BLOCKS).set(0, state)
        self.set_gauges()

    def set_engine(self, hello: EngineHello) -> None:
        """Record the epoch of the engine, and set the gauges of its block size, number of blocks
        and number of batch slots."""
        self._begin_epoch(hello.epoch)
        info = hello.executor
        gauge = self._tables.gauge
        gauge(catalogue.KV_BLOCK_SIZE).set(info.block_size)
        gauge(catalogue.KV_TOTAL).set(info.num_blocks)
        gauge(catalogue.MAX_RUNNING).set(info.max_num_seqs)

    def set_engine_up(self, epoch: int, is_up: bool) -> None:
        """Record whether a front (gRPC server process) is connected to an engine, and the epoch of
        that engine. Without an engine, `set_gauges` sets the load to zero."""
        self._begin_epoch(epoch)
        self._is_up = is_up
        self._tables.gauge(catalogue.ENGINE_UP).set(float(is_up))

    def add_steps(self, epoch: int, rows: NDArray[Any], num_missed: int) -> None:
        """Add STEP rows of the engine of `epoch`, the oldest first; that engine may have ended.
        `num_missed` is the number of preceding steps that were overwritten before they were
        read."""
        self._begin_epoch(epoch)
        counter = self._tables.counter
        counter(catalogue.MISSED_STEPS).add(num_missed)
        if not len(rows):
            return
        if epoch == self._epoch:
            self._last = rows[-1:].copy()
        counter(catalogue.PREFILL_TOKENS).add(_sum(rows, "num_prefill_tokens"))
        for name, column in _IN_ROWS.items():
            self._count_rows(epoch, name, _sum(rows, column))
        self._observe(rows)

    def set_totals(self, epoch: int, totals: Mapping[str, int]) -> None:
        """Increase the counters of output tokens, admissions and preemptions to the totals of the
        flight recorder.

        The totals include steps that were overwritten before they were read. Therefore `add_steps`
        no longer updates these counters for this engine. Totals of an older engine are ignored.
        """
        self._begin_epoch(epoch)
        if epoch != self._epoch:
            return
        for name, spec in _TOTALS.items():
            if name not in totals:
                continue
            counted = self._from_totals.get(name, self._from_rows[name])
            self._tables.counter(spec).add(max(0, totals[name] - counted))
            self._from_totals[name] = max(counted, totals[name])

    def set_gauges(self, load: LoadState | None = None) -> None:
        """Set the gauges of the batch, the queue and the cache, and update the counters of
        shortened and dropped retentions of cached blocks.

        `load` is the load that the engine reports now. If it is None, the load after the last step
        is used. The load is zero while there is no engine.
        """
        row = self._last[0] if self._last is not None and self._is_up else None
        if load is None and row is not None:
            load = _load_after(row, self._epoch)
        if load is None or not self._is_up or load.epoch < self._epoch:
            load = NO_LOAD
        if load.epoch != self._epoch:
            row = None  # It belongs to an earlier engine.
        gauge = self._tables.gauge
        gauge(catalogue.RUNNING).set(load.num_running)
        gauge(catalogue.WAITING).set(load.num_waiting)
        gauge(catalogue.WAITING_TOKENS).set(load.num_waiting_tokens)
        waits_for = 0 if row is None or not load.num_waiting else int(row["waits_for"])
        for reason in WaitReason:
            gauge(catalogue.HEAD_WAITS).set(float(reason == waits_for), reason.name.lower())
        self._set_blocks(load.num_used_blocks, row)
        self._count_cuts(load)

    def _count_cuts(self, load: LoadState) -> None:
        counted = self._cuts
        cuts = (load.num_shortened_retentions, load.num_dropped_blocks)
        self._cuts = (max(counted[0], cuts[0]), max(counted[1], cuts[1]))
        self._tables.counter(catalogue.SHORTENED_RETENTIONS).add(self._cuts[0] - counted[0])
        self._tables.counter(catalogue.DROPPED_RETENTIONS).add(self._cuts[1] - counted[1])

    def _set_blocks(self, used: int, row: Any) -> None:
        """Set the gauges of KV blocks. `used` is the number of blocks that requests use. `row` is
        the row of the last step, None without one.

        Blocks that were released since that step count as cached until the next step.
        """
        gauge, held = self._tables.gauge, used
        if row is not None:
            held = int(row["num_used_blocks"]) + int(row["num_cached_blocks"])
            gauge(catalogue.KV_TOTAL).set(held + int(row["num_free_blocks"]))
        total = int(gauge(catalogue.KV_TOTAL).value())
        used = min(used, total)
        held = min(max(held, used), total)
        for state, num in zip(_STATES, (used, held - used, total - held), strict=True):
            gauge(catalogue.KV_BLOCKS).set(num, state)
        gauge(catalogue.KV_USAGE).set(used / total if total else 0)

    def _begin_epoch(self, epoch: int) -> None:
        """If `epoch` belongs to a newer engine, count the restarts since the previous engine and
        reset the state of the previous engine. Otherwise do nothing."""
        if epoch <= self._epoch:
            return
        self._tables.counter(catalogue.ENGINE_RESTARTS).add(epoch - max(1, self._epoch))
        self._epoch, self._last = epoch, None
        self._from_rows = dict.fromkeys(_TOTALS, 0)
        self._from_totals = {}
        self._cuts = (0, 0)

    def _count_rows(self, epoch: int, name: str, num: int) -> None:
        if epoch == self._epoch:
            if name in self._from_totals:
                return
            self._from_rows[name] += num
        self._tables.counter(_TOTALS[name]).add(num)

    def _observe(self, rows: NDArray[Any]) -> None:
        histogram, counter = self._tables.histogram, self._tables.counter
        measured = rows["collected_s"] - rows["launched_s"]
        histogram(catalogue.STEP_SECONDS).observe(measured)
        planning = rows["launched_s"] - rows["begun_s"] + rows["updated_s"] - rows["collected_s"]
        histogram(catalogue.SCHEDULER_SECONDS).observe(planning)
        num_decodes = rows["num_decodes"].astype(np.int64)
        histogram(catalogue.STEP_TOKENS).observe(rows["num_prefill_tokens"] + num_decodes)
        histogram(catalogue.STEP_BATCH).observe(rows["num_prefill_rows"] + num_decodes)
        histogram(catalogue.ITL).observe(rows["itl_s"], weights=rows["num_itl"])
        predicted = rows["predicted_s"].astype(np.float64)
        is_predicted = np.isfinite(predicted) & np.isfinite(measured) & (measured >= 0)
        predicted, measured = predicted[is_predicted], measured[is_predicted]
        histogram(catalogue.STEP_ERROR).observe(np.abs(predicted - measured))
        counter(catalogue.STEP_PREDICTED).add(max(0.0, float(predicted.sum())))
        counter(catalogue.STEP_MEASURED).add(float(measured.sum()))


def _load_after(row: Any, epoch: int) -> LoadState:
    """Return the load of the engine of `epoch` after the step of `row`. `num_output_tokens` is 0,
    because a row does not have the total."""
    return LoadState(
        epoch=epoch,
        num_running=int(row["num_running"]),
        num_waiting=int(row["num_waiting"]),
        num_waiting_tokens=int(row["num_waiting_tokens"]),
        num_used_blocks=int(row["num_used_blocks"]),
        num_output_tokens=0,
    )


def _sum(rows: NDArray[Any], column: str) -> int:
    return int(rows[column].sum(dtype=np.int64))
