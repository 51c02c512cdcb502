"""If a step raises because of some rows, exactly the requests of these rows fail, and the others
get their results.
"""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.executor.isolation import run_isolated
from penstock.scheduler.batch import Batch, StepResult, TokenLogprobs
from penstock.scheduler.executor import ExecutorDied
from penstock.scheduler.slot_arrays import SlotArrays

NUM_SLOTS = 40


class Device:
    """Computes rows. It raises for a step with a slot in `bad` or with more than `max_tokens`
    tokens, and in its first `passing_errors` calls. Results of slots in `asking` have logprobs.
    """

    def __init__(
        self,
        *,
        bad: frozenset[int] = frozenset(),
        max_tokens: int = 10**9,
        asking: frozenset[int] = frozenset(),
        passing_errors: int = 0,
    ) -> None:
        self.bad = bad
        self.max_tokens = max_tokens
        self.asking = asking
        self.passing_errors = passing_errors
        self.parts: list[Batch] = []
        self.errors: list[Exception] = []

    def run(self, batch: Batch) -> StepResult:
        self.parts.append(batch)
        if len(self.errors) < self.passing_errors:
            raise RuntimeError("this will pass")
        if int(batch.num_tokens.sum()) > self.max_tokens:
            raise MemoryError("no room")
        if self.bad & set(batch.slots.tolist()):
            raise ValueError("secret prompt")
        slots = batch.sampled_slots
        widths = [slot % 5 for slot in slots.tolist() if slot in self.asking]
        logprobs = None
        if widths:
            logprobs = TokenLogprobs(
                chosen=slots.astype(np.float32),
                ranks=slots,
                top_ids=np.repeat(slots[:, None], max(widths), axis=1),
                top_logprobs=np.repeat(slots[:, None], max(widths), axis=1).astype(np.float32),
            )
        return StepResult(slots=slots, tokens=slots * 3, logprobs=logprobs)

    def recover(self, error: Exception) -> None:
        self.errors.append(error)


def batch_of(num_decodes: int, chunks: list[tuple[int, bool]]) -> Batch:
    """Return a batch: decode rows in the highest slots, then `chunks`, each given as (number of
    tokens, whether a token is sampled after it).
    """
    num_rows = num_decodes + len(chunks)
    slots = np.arange(NUM_SLOTS - 1, NUM_SLOTS - 1 - num_rows, -1, dtype=np.int32)
    is_sampled = [True] * num_decodes + [completes for _, completes in chunks]
    return Batch(
        step=1,
        arrays=SlotArrays(num_slots=NUM_SLOTS, max_seq_len=8, block_size=4),
        slots=slots,
        num_tokens=np.array([1] * num_decodes + [count for count, _ in chunks], dtype=np.int32),
        starts=np.full(num_rows, 3, dtype=np.int32),
        num_decodes=num_decodes,
        sampled_slots=slots[np.array(is_sampled, dtype=bool)],
        released=(1,),
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    num_decodes = draw(st.integers(0, 20))
    chunks = draw(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=15))
    return batch_of(num_decodes, chunks or [(2, True)])


@given(st.data())
def test_exactly_the_bad_rows_fail(data: st.DataObject) -> None:
    batch = data.draw(batches())
    slots = st.frozensets(st.sampled_from(batch.slots.tolist()))
    device = Device(bad=data.draw(slots), asking=data.draw(slots))

    result = run_isolated(batch, device.run, device.recover)

    assert {failure.slot for failure in result.failures} == device.bad
    well = [slot for slot in batch.sampled_slots.tolist() if slot not in device.bad]
    assert result.slots.tolist() == well
    assert result.tokens.tolist() == [slot * 3 for slot in well]
    assert all(failure.detail.startswith("the step raised ") for failure in result.failures)
    assert not any("secret" in failure.detail for failure in result.failures)
    if device.asking & set(well):
        assert result.logprobs is not None
        for row, slot in enumerate(well):
            if slot in device.asking:
                width = slot % 5
                assert result.logprobs.ranks[row] == slot
                assert result.logprobs.top_ids[row, :width].tolist() == [slot] * width


@given(st.data())
def test_the_search_is_bounded(data: st.DataObject) -> None:
    batch = data.draw(batches())
    device = Device(bad=data.draw(st.frozensets(st.sampled_from(batch.slots.tolist()))))

    run_isolated(batch, device.run, device.recover)

    num_rows, num_bad = batch.num_rows, len(device.bad)
    depth = math.ceil(math.log2(num_rows))
    assert len(device.parts) <= min(2 * num_rows, 2 + 2 * num_bad * depth) if num_bad else True
    assert len(device.parts) == 1 or num_bad
    assert sum(part.num_rows for part in device.parts) <= num_rows * (depth + 2)
    for part in device.parts[1:]:
        assert (part.admitted, part.released) == ((), ())
        is_decode = np.arange(part.num_rows) < part.num_decodes
        assert (part.num_tokens[is_decode] == 1).all()


@given(batches(), st.integers(9, 40))
def test_a_step_that_is_too_large_is_run_in_parts_that_fit(batch: Batch, room: int) -> None:
    device = Device(max_tokens=room)

    result = run_isolated(batch, device.run, device.recover)

    assert result.failures == ()
    assert result.slots.tolist() == batch.sampled_slots.tolist()


@given(batches())
def test_an_error_that_passes_costs_no_request_anything(batch: Batch) -> None:
    device = Device(passing_errors=1)

    result = run_isolated(batch, device.run, device.recover)

    assert (len(device.parts), result.failures) == (2, ())
    assert result.slots.tolist() == batch.sampled_slots.tolist()


@given(batches(), st.integers(0, 6))
def test_nothing_is_searched_on_a_device_that_is_lost(batch: Batch, num_errors: int) -> None:
    device = Device(bad=frozenset(batch.slots.tolist()))

    def recover(_error: Exception) -> None:
        device.errors.append(_error)
        if len(device.errors) > num_errors:
            raise ExecutorDied("lost")

    try:
        run_isolated(batch, device.run, recover)
    except ExecutorDied:
        assert len(device.parts) == len(device.errors) == num_errors + 1
    else:
        assert len(device.errors) <= num_errors
