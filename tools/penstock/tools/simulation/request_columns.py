"""A table of all requests of a run, stored as columns.

The request in row i has the key i + 1 in the engine.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.server.observe.recording.trace import TraceRequest

UNFINISHED = 0
"""The outcome of a request that has not ended."""
_FIRST_CAPACITY = 1024


class RequestColumns:
    """Columns with one row per request, read with `seconds` and `counts`. Times are seconds of
    virtual time, NaN if the event has not occurred.

    The columns `arrival_s`, `num_prompt_tokens`, `num_trace_tokens`, `tenant` and `priority` come
    from the trace; all others are measured in the run.

    Attributes:
        num_trace_tokens: Output tokens that the trace specifies.
        tenant: Index into `tenants`.
        admitted_s: Time of the first admission.
        first_token_s, last_token_s, end_s: Times of the first and last token, and of the end.
        num_cached_tokens: Cached tokens of the prompt at the first admission.
        num_prefill_tokens: Tokens computed in prefills, including recomputation after preemptions.
        outcome: Index into `outcomes`.
        num_slow_gaps, max_gap_s: The number of slow gaps between the request's tokens (see
            `RunRecorder`), and the longest gap in seconds; 0 if there are none.
    """

    def __init__(self) -> None:
        self._num = 0
        self.tenants: list[str] = []
        self.outcomes: list[str] = ["unfinished"]
        self._tenant_index: dict[str, int] = {}
        self._outcome_index: dict[str, int] = {"unfinished": UNFINISHED}
        self._floats: dict[str, NDArray[np.float64]] = {
            name: np.full(_FIRST_CAPACITY, math.nan)
            for name in ("arrival_s", "admitted_s", "first_token_s", "last_token_s", "end_s")
        }
        self._floats["max_gap_s"] = np.zeros(_FIRST_CAPACITY)
        self._ints: dict[str, NDArray[np.int64]] = {
            name: np.zeros(_FIRST_CAPACITY, dtype=np.int64)
            for name in (
                "num_prompt_tokens",
                "num_trace_tokens",
                "tenant",
                "priority",
                "num_output_tokens",
                "num_cached_tokens",
                "num_prefill_tokens",
                "num_preemptions",
                "outcome",
                "num_slow_gaps",
            )
        }

    def __len__(self) -> int:
        return self._num

    @classmethod
    def merged(
        cls, tables: "Sequence[RequestColumns]", sources: NDArray[np.int64]
    ) -> "RequestColumns":
        """Return a table with the rows of all tables. Row i is the next row of table `sources[i]`
        that was not used yet. `sources` int64 [n].
        """
        merged = cls()
        merged._num = len(sources)
        rows = np.argsort(sources, kind="stable")
        for name in merged._floats:
            merged._floats[name] = _in_order(rows, [table.seconds(name) for table in tables])
        for name in merged._ints:
            columns = [table.counts(name) for table in tables]
            if name == "tenant":
                columns = _renumbered(columns, [t.tenants for t in tables], merged.tenant_index)
            if name == "outcome":
                columns = _renumbered(columns, [t.outcomes for t in tables], merged.outcome_index)
            merged._ints[name] = _in_order(rows, columns)
        return merged

    def add(self, request: TraceRequest) -> int:
        """Append a request that arrives; return its engine key."""
        index = self._num
        if index == len(self._floats["arrival_s"]):
            self._grow()
        self._num += 1
        self._floats["arrival_s"][index] = request.arrival_s
        self._ints["num_prompt_tokens"][index] = request.num_prompt_tokens
        self._ints["num_trace_tokens"][index] = request.num_output_tokens
        self._ints["tenant"][index] = self.tenant_index(request.tenant)
        self._ints["priority"][index] = request.priority
        return index + 1

    def output_length(self, key: int) -> int:
        """Return the number of output tokens that the trace specifies for the request with this
        engine key.
        """
        return int(self._ints["num_trace_tokens"][key - 1])

    def tenant_index(self, tenant: str) -> int:
        """Return the index of a tenant; a new tenant gets a new index."""
        index = self._tenant_index.setdefault(tenant, len(self.tenants))
        if index == len(self.tenants):
            self.tenants.append(tenant)
        return index

    def outcome_index(self, outcome: str) -> int:
        """Return the index of an outcome; a new outcome gets a new index."""
        index = self._outcome_index.setdefault(outcome, len(self.outcomes))
        if index == len(self.outcomes):
            self.outcomes.append(outcome)
        return index

    def seconds(self, name: str) -> NDArray[np.float64]:
        """Return a column of times or durations, float64 [len]; a writable view."""
        return self._floats[name][: self._num]

    def counts(self, name: str) -> NDArray[np.int64]:
        """Return a column of integers, int64 [len]; a writable view."""
        return self._ints[name][: self._num]

    def _grow(self) -> None:
        for name, floats in self._floats.items():
            unknown = 0.0 if name == "max_gap_s" else math.nan
            self._floats[name] = np.concatenate((floats, np.full(len(floats), unknown)))
        for name, ints in self._ints.items():
            self._ints[name] = np.concatenate((ints, np.zeros_like(ints)))


_Scalar = TypeVar("_Scalar", np.float64, np.int64)


def _in_order(rows: NDArray[np.int64], columns: list[NDArray[_Scalar]]) -> NDArray[_Scalar]:
    """Return the concatenated columns in another order: entry k becomes entry `rows[k]`."""
    joined = np.concatenate(columns)
    placed = np.empty_like(joined)
    placed[rows] = joined
    return placed


def _renumbered(
    columns: list[NDArray[np.int64]], names: list[list[str]], number_of: Callable[[str], int]
) -> list[NDArray[np.int64]]:
    """Return the columns with new indexes. Each entry of a column is an index into its table's
    `names`; it is replaced by what `number_of` returns for that name.
    """
    return [
        np.array([number_of(name) for name in its_names], dtype=np.int64)[column]
        for column, its_names in zip(columns, names, strict=True)
    ]
