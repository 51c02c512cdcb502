"""When a step raises, runs it again as a whole, then in parts, to isolate the rows that cause the
error.

Merges the results of the parts. The caller decides whether the device can continue.

A step may be repeated any number of times: a row writes its keys and values to the same locations
again, reads nothing that another row of the step writes, and its token depends only on its own
sequence. So the other rows get the same results.

The work is bounded: a step of n rows runs twice as a whole, then in at most 2n - 2 parts; each row
runs at most ceil(log2(n)) + 2 times.
"""

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.batch import Batch, SlotFailure, StepResult, TokenLogprobs
from penstock.scheduler.executor import ExecutorDied

RunPart = Callable[[Batch], StepResult]
Recover = Callable[[Exception], None]


def run_isolated(batch: Batch, run: RunPart, recover: Recover) -> StepResult:
    """Run a step and return its result; if it raises, isolate the failing rows, so that only these
    fail.

    `run` is called with `batch`. If this raises, `run` is called again, with batches of all or some
    of the rows, without admissions and releases. ExecutorDied from `run` ends the search and is
    raised. `recover` is called with every other exception, for cleanup. An exception from `recover`
    ends the search too, for example ExecutorDied if the whole executor has failed.
    """
    try:
        return run(batch)
    except ExecutorDied:
        raise
    # On any exception, search for the row that caused it.
    except Exception as error:
        _recover(error, recover)
    rows = _RowSearch(batch, run, recover)
    # Repeat the whole step first: the cause may have been temporary, for example a lack of memory.
    rows.isolate(0, batch.num_rows)
    return _joined(rows.results, tuple(rows.failures))


class _RowSearch:
    """Finds the rows of one batch that cause an error; collects results in row order."""

    def __init__(self, batch: Batch, run: RunPart, recover: Recover) -> None:
        self._batch = batch
        self._run = run
        self._recover = recover
        self.results: list[StepResult] = []
        self.failures: list[SlotFailure] = []

    def isolate(self, first: int, last: int) -> None:
        """Run rows `first .. last - 1`; if they raise, run each half separately, recursively;
        record a single row that raises as failed.
        """
        error = self._try(first, last)
        if not error:
            return
        if last - first <= 1:
            slots = self._batch.slots[first:last].tolist()
            self.failures.extend(SlotFailure(slot=slot, detail=error) for slot in slots)
            return
        middle = (first + last) // 2
        self.isolate(first, middle)
        self.isolate(middle, last)

    def _try(self, first: int, last: int) -> str:
        """Run the rows; return the error, or an empty string if there was none."""
        try:
            self.results.append(self._run(_part(self._batch, first, last)))
        except ExecutorDied:
            raise
        except Exception as error:
            _recover(error, self._recover)
            return _describe(error)
        return ""


def _recover(error: Exception, recover: Recover) -> None:
    # The traceback's frames hold the step's tensors, whose memory a repeated step may need.
    traceback.clear_frames(error.__traceback__)
    recover(error)


def _part(batch: Batch, first: int, last: int) -> Batch:
    """Return rows `first .. last - 1` as a batch without admissions and releases, because the run
    of the whole batch has applied these.
    """
    slots = batch.slots[first:last]
    return replace(
        batch,
        slots=slots,
        num_tokens=batch.num_tokens[first:last],
        starts=batch.starts[first:last],
        num_decodes=min(max(batch.num_decodes - first, 0), last - first),
        sampled_slots=batch.sampled_slots[np.isin(batch.sampled_slots, slots)],
        admitted=(),
        released=(),
    )


def _describe(error: Exception) -> str:
    """Return the error's type and location. Its text is left out because it may quote a client's
    data.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"the step raised {type(error).__name__}{where}"


def _joined(results: list[StepResult], failures: tuple[SlotFailure, ...]) -> StepResult:
    """Merge the parts' results in row order."""
    if not results:
        none: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        return StepResult(slots=none, tokens=none, failures=failures)
    counts: NDArray[np.int32] | None = None
    if any(result.counts is not None for result in results):
        counts = np.concatenate(
            [
                np.ones(len(result.slots), dtype=np.int32)
                if result.counts is None
                else result.counts
                for result in results
            ]
        )
    return StepResult(
        slots=np.concatenate([result.slots for result in results]),
        tokens=np.concatenate([result.tokens for result in results]),
        counts=counts,
        logprobs=_joined_logprobs(results),
        prompt_logprobs=tuple(found for result in results for found in result.prompt_logprobs),
        failures=failures + tuple(found for result in results for found in result.failures),
    )


def _joined_logprobs(results: list[StepResult]) -> TokenLogprobs | None:
    """Return the parts' logprobs as one row per token; None if no part has any.

    Tokens of parts without logprobs have 0 in every field, the top ids included.
    """
    asked = [result.logprobs for result in results if result.logprobs is not None]
    if not asked:
        return None
    num_top = max(logprobs.top_ids.shape[1] for logprobs in asked)
    num_tokens = sum(len(result.tokens) for result in results)
    joined = TokenLogprobs(
        chosen=np.zeros(num_tokens, dtype=np.float32),
        ranks=np.zeros(num_tokens, dtype=np.int32),
        top_ids=np.zeros((num_tokens, num_top), dtype=np.int32),
        top_logprobs=np.zeros((num_tokens, num_top), dtype=np.float32),
    )
    first = 0
    for result in results:
        rows = slice(first, first + len(result.tokens))
        first = rows.stop
        if result.logprobs is not None:
            width = result.logprobs.top_ids.shape[1]
            joined.chosen[rows] = result.logprobs.chosen
            joined.ranks[rows] = result.logprobs.ranks
            joined.top_ids[rows, :width] = result.logprobs.top_ids
            joined.top_logprobs[rows, :width] = result.logprobs.top_logprobs
    return joined
