"""Measures a run from the events of each step of the engine.

Records request times, gaps between tokens, output tokens per tenant and memory samples. Python code
runs once per step and once per event of a request, but not per token: tokens are counted in bulk.
`summary` computes the figures.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Completed, Failed, Preempted, StepEvents
from penstock.tools.simulation.histogram import DurationHistogram
from penstock.tools.simulation.request_columns import RequestColumns

_BULK_TOKENS = 262_144
_MAX_BINS = 32_768


class RunRecorder:
    """The measurements of one engine's run, or the merged ones of several engines.

    `slow_gap_s`: a longer gap between two tokens of a request counts as slow; the p99 of a
    request's gaps is within it if at most 1 % of them are slow. `gaps`: a histogram of all gaps.
    `timeline_bin_s`: width, in seconds, of the time bins in which output tokens are counted per
    tenant; it is doubled when there would be more than 32,768 bins. `sample_every_steps`: steps per
    sample in `samples`. `num_steps` excludes iterations of the engine without computation. `on_end`
    is called for every ended request, after the step that ends it.
    """

    def __init__(
        self,
        *,
        slow_gap_s: float,
        timeline_bin_s: float,
        sample_every_steps: int,
        on_end: Callable[[Completed | Failed], None] | None = None,
    ) -> None:
        self.table = RequestColumns()
        self.gaps = DurationHistogram()
        self.timeline_bin_s = timeline_bin_s
        self.samples = MemorySamples()
        self.num_steps = 0
        self.num_ended = 0
        self._slow_gap_s = slow_gap_s
        self._on_end = on_end
        self._sample_every_steps = sample_every_steps
        self._keys: list[NDArray[np.int64]] = []
        self._times_s: list[float] = []
        self._num_buffered = 0
        self._num_iterations = 0
        self._latest_s = 0.0
        self._served: NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)

    def merge_from(self, recorders: "Sequence[RunRecorder]", sources: NDArray[np.int64]) -> None:
        """Fill this new recorder with the merged measurements of other recorders, which must be
        flushed and have the same settings.

        `sources` int64 [n]: entry i is the index of the recorder that has request i of the merged
        run. `samples` are not merged. May widen the bins of the other recorders.
        """
        self.table = RequestColumns.merged([recorder.table for recorder in recorders], sources)
        self._widen(max(recorder.timeline_bin_s for recorder in recorders))
        for recorder in recorders:
            recorder._widen(self.timeline_bin_s)  # noqa: SLF001 -- an instance of the same class
        served = [recorder.served_tokens() for recorder in recorders]
        shape = (max(len(bins) for bins in served), len(self.table.tenants))
        self._served = np.zeros(shape, dtype=np.int64)
        for recorder, its_served in zip(recorders, served, strict=True):
            self.gaps.merge(recorder.gaps)
            self.num_steps += recorder.num_steps
            self.num_ended += recorder.num_ended
            columns = [self.table.tenant_index(name) for name in recorder.table.tenants]
            self._served[: len(its_served), columns] += its_served

    def note(self, events: StepEvents, engine: Engine, num_held_back: int) -> None:
        """Record the events of one step; `num_held_back`: requests waiting outside the engine."""
        if events.at_s > self._latest_s or len(events.keys):
            self._latest_s = events.at_s
            self.num_steps += 1
        if len(events.keys):
            self._keys.append(events.keys)
            self._times_s.append(events.at_s)
            self._num_buffered += len(events.keys)
            if self._num_buffered >= _BULK_TOKENS:
                self.flush()
        for change in events.changes:
            if isinstance(change, Admitted):
                self._note_admitted(change)
            elif isinstance(change, Preempted):
                self.table.counts("num_preemptions")[change.key - 1] += 1
        for end in events.ends:
            self._note_end(end)
        self._num_iterations += 1
        if self._num_iterations % self._sample_every_steps == 0:
            self.samples.add(events.at_s, engine, num_held_back)

    def note_prefill(self, keys: NDArray[np.int64], counts: NDArray[np.int32]) -> None:
        """Add the prompt tokens that a step computes to the totals of the requests. `keys` int64
        [m]: distinct engine keys; `counts` int32 [m]: prompt tokens computed for each.
        """
        self.table.counts("num_prefill_tokens")[keys - 1] += counts

    def flush(self) -> None:
        """Count the tokens that are still in the buffer."""
        if not self._num_buffered:
            return
        lengths = np.array([len(keys) for keys in self._keys])
        times_s = np.repeat(np.array(self._times_s), lengths)
        index = np.concatenate(self._keys) - 1
        self._keys.clear()
        self._times_s.clear()
        self._num_buffered = 0
        self._count_served(index, times_s)
        order = np.argsort(index, kind="stable")
        self._measure_gaps(index[order], times_s[order])

    def served_tokens(self) -> NDArray[np.int64]:
        """Return the output tokens per time bin and tenant, int64 [bins, tenants], without the
        tokens in the buffer.
        """
        served = np.zeros((len(self._served), len(self.table.tenants)), dtype=np.int64)
        served[:, : self._served.shape[1]] = self._served
        return served

    def _note_admitted(self, change: Admitted) -> None:
        index, table = change.key - 1, self.table
        if change.num_preemptions == 0:
            table.seconds("admitted_s")[index] = change.at_s
            table.counts("num_cached_tokens")[index] = change.num_cached_tokens

    def _note_end(self, end: Completed | Failed) -> None:
        index, table = end.key - 1, self.table
        table.seconds("end_s")[index] = end.at_s
        outcomes = table.counts("outcome")
        if outcomes[index]:
            raise RuntimeError(f"request {end.key} ended twice")
        outcomes[index] = table.outcome_index(end.reason.name.lower())
        self.num_ended += 1
        if self._on_end is not None:
            self._on_end(end)

    def _count_served(self, index: NDArray[np.int64], times_s: NDArray[np.float64]) -> None:
        latest_s, bin_s = float(times_s.max()), self.timeline_bin_s
        while latest_s / bin_s >= _MAX_BINS:
            bin_s *= 2.0
        self._widen(bin_s)
        bins = (times_s / bin_s).astype(np.int64)
        num_bins, num_tenants = int(bins.max()) + 1, len(self.table.tenants)
        if num_bins > len(self._served) or num_tenants > self._served.shape[1]:
            shape = (max(num_bins, len(self._served)), num_tenants)
            grown: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
            grown[: self._served.shape[0], : self._served.shape[1]] = self._served
            self._served = grown
        cells = bins * num_tenants + self.table.counts("tenant")[index]
        counts = np.bincount(cells, minlength=num_bins * num_tenants)
        self._served[:num_bins] += counts.reshape(num_bins, num_tenants)

    def _widen(self, bin_s: float) -> None:
        """Merge the bins to a width of `bin_s`, the current width times a power of two."""
        while self.timeline_bin_s < bin_s:
            self.timeline_bin_s *= 2.0
            starts = np.arange(0, len(self._served), 2)
            if len(starts):
                self._served = np.add.reduceat(self._served, starts, axis=0)

    def _measure_gaps(self, index: NDArray[np.int64], times_s: NDArray[np.float64]) -> None:
        """Record gaps, token counts and token times. `index` [m]: the row of each token's request;
        `times_s` [m]; sorted by request and then by time.
        """
        table = self.table
        firsts = np.flatnonzero(np.concatenate(([True], index[1:] != index[:-1])))
        rows = index[firsts]
        previous_s = np.concatenate(([0.0], times_s[:-1]))
        previous_s[firsts] = table.seconds("last_token_s")[rows]
        gaps = times_s - previous_s
        is_first_token = np.isnan(previous_s)
        table.seconds("first_token_s")[index[is_first_token]] = times_s[is_first_token]
        gaps[is_first_token] = 0.0
        self.gaps.add(gaps[~is_first_token])
        max_gap = table.seconds("max_gap_s")
        max_gap[rows] = np.maximum(max_gap[rows], np.maximum.reduceat(gaps, firsts))
        is_slow = (gaps > self._slow_gap_s).astype(np.int64)
        table.counts("num_slow_gaps")[rows] += np.add.reduceat(is_slow, firsts)
        ends = np.concatenate((firsts[1:], [len(index)]))
        table.counts("num_output_tokens")[rows] += ends - firsts
        table.seconds("last_token_s")[rows] = times_s[ends - 1]


class MemorySamples:
    """Samples of an engine's load and KV cache use, each taken after a step, as lists of equal
    length.

    `num_waiting` includes the requests held back before the engine. `num_unused_tokens`: empty
    token slots in allocated blocks.
    """

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.num_running: list[int] = []
        self.num_waiting: list[int] = []
        self.num_used_blocks: list[int] = []
        self.num_unused_tokens: list[int] = []

    def add(self, at_s: float, engine: Engine, num_held_back: int) -> None:
        """Add a sample. `num_held_back`: number of requests that wait outside the engine."""
        cache, arrays = engine.cache, engine.arrays
        self.at_s.append(at_s)
        self.num_running.append(len(engine.running))
        self.num_waiting.append(len(engine.queue) + num_held_back)
        self.num_used_blocks.append(cache.pool.num_used)
        # Shared blocks are full and are counted for every request in both sums, so they cancel out.
        self.num_unused_tokens.append(int(cache.capacity.sum()) - int(arrays.num_computed.sum()))
