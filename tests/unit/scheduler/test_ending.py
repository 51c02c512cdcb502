"""How requests end in every state, which are rejected, and which results of an executor are
invalid.
"""

import numpy as np
import pytest

from penstock.scheduler.batch import SlotFailure, StepResult
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Completed, Failed, Residency
from penstock.scheduler.request import FailureReason, FinishReason
from penstock.scheduler.state import RequestState
from support.core import (
    FakeClock,
    NullExecutor,
    ends,
    make_engine,
    make_info,
    make_spec,
    outputs,
    run_until_idle,
)


def reason(engine: Engine, key: int) -> FinishReason | FailureReason:
    return ends(run_until_idle(engine))[key].reason


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_cancel_takes_effect_at_once_in_every_state(num_steps: int) -> None:
    engine, executor = make_engine(max_num_batched_tokens=8)
    engine.submit((make_spec(1, 15, max_tokens=9),))
    for _ in range(num_steps):
        engine.step()
    assert engine.cancel(1)
    assert not engine.cancel(1)
    engine.check_integrity()
    assert engine.cache.pool.num_used == 0
    assert reason(engine, 1) is FinishReason.CANCELLED
    assert len(executor.batches) == num_steps


def test_cancel_by_id_ends_every_output_of_that_request_only() -> None:
    engine, _ = make_engine()
    engine.submit(
        tuple(make_spec(k, [1, 2, 3, 4, 5], request_id="mine", leader_key=k - 1) for k in (1, 2))
    )
    engine.submit((make_spec(3, request_id="other"),))
    assert engine.cancel_by_id("mine") is RequestState.PENDING
    assert not engine.cancel_by_id("mine")
    reported = run_until_idle(engine)
    assert {key: end.reason for key, end in ends(reported).items()} == {
        1: FinishReason.CANCELLED,
        2: FinishReason.CANCELLED,
        3: FinishReason.LENGTH,
    }


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"deadline_s": 5.0}, FailureReason.DEADLINE_EXCEEDED),
        ({"ttft_deadline_s": 5.0}, FailureReason.TTFT_DEADLINE_EXCEEDED),
        ({"time_limit_s": 5.0}, FinishReason.TIME_LIMIT),
        ({"time_limit_s": 5.0, "deadline_s": 5.0}, FinishReason.TIME_LIMIT),
    ],
)
@pytest.mark.parametrize("runs", [False, True])
def test_time_limits_hold_in_the_queue_and_while_running(
    limits: dict[str, float], expected: object, runs: bool
) -> None:
    clock = FakeClock()
    engine, executor = make_engine(clock=clock, max_num_seqs=1, max_num_batched_tokens=4)
    if not runs:
        engine.submit((make_spec(9, 3, max_tokens=50),))
        engine.step()
    engine.submit((make_spec(1, 15, max_tokens=9, **limits),))  # type: ignore[arg-type]
    engine.step()
    if not runs:
        assert engine.next_wakeup_s() == 5.0
    num_batches = len(executor.batches)
    clock.now_s = 5.0
    reported = engine.step()
    engine.check_integrity()
    assert [(end.key, end.reason) for end in reported.ends] == [(1, expected)]
    if runs:
        assert len(executor.batches) == num_batches, "no step was spent on it"


def test_the_first_token_meets_the_ttft_deadline_for_good() -> None:
    clock = FakeClock()
    engine, _ = make_engine(clock=clock)
    engine.submit((make_spec(1, 3, max_tokens=3, ttft_deadline_s=5.0),))
    engine.step()
    clock.now_s = 6.0
    assert reason(engine, 1) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (make_spec(1, 60, max_tokens=5), FailureReason.PROMPT_TOO_LONG),
        (make_spec(1, 30, max_tokens=20), FailureReason.EXCEEDS_KV_CACHE),
        (make_spec(1, deadline_s=0.0), FailureReason.DEADLINE_EXCEEDED),
        (make_spec(1, ttft_deadline_s=-1.0), FailureReason.TTFT_DEADLINE_EXCEEDED),
    ],
)
def test_rejections_at_admission(spec: object, expected: FailureReason) -> None:
    engine, executor = make_engine(num_blocks=12)
    engine.submit((spec,))  # type: ignore[arg-type]
    assert reason(engine, 1) is expected
    assert not executor.batches


def test_a_model_that_could_take_more_than_the_cache_costs_no_memory_for_it() -> None:
    engine, _ = make_engine(num_blocks=12, max_seq_len=1_000_000_000)
    assert engine.arrays.token_ids.shape[1] == 12 * 4 + 1
    engine.submit((make_spec(1, 30, max_tokens=19),))
    engine.submit((make_spec(2, 30, max_tokens=20),))
    reported = ends(run_until_idle(engine))
    assert reported[1].reason is FinishReason.LENGTH
    assert reported[2].reason is FailureReason.EXCEEDS_KV_CACHE


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    engine, _ = make_engine(max_num_waiting=3, max_num_waiting_tokens=30)
    engine.submit((make_spec(1, 20),))
    engine.submit((make_spec(2, 20),))
    engine.submit((make_spec(3, 10),))
    pair = tuple(make_spec(k, [1], request_id="pair", leader_key=k - 5) for k in (5, 6))
    engine.submit(pair)
    reported = run_until_idle(engine)
    rejected = {k for k, end in ends(reported).items() if end.reason is FailureReason.QUEUE_FULL}
    assert rejected == {2, 5, 6}


def test_an_id_in_flight_is_rejected_and_the_first_is_unharmed() -> None:
    engine, _ = make_engine()
    engine.submit((make_spec(1, request_id="same"),))
    engine.submit((make_spec(2, request_id="same"),))
    engine.submit((make_spec(1, request_id="same key"),))
    events = engine.step()
    assert [(end.key, end.reason) for end in events.ends] == [
        (2, FailureReason.REQUEST_ID_IN_USE),
        (1, FailureReason.REQUEST_ID_IN_USE),
    ]
    run_until_idle(engine)
    engine.submit((make_spec(3, request_id="same"),))
    assert reason(engine, 3) is FinishReason.LENGTH


def test_siblings_are_all_accepted_or_all_rejected() -> None:
    engine, _ = make_engine()
    twins = tuple(make_spec(1, [1, 2], request_id="twins") for _ in range(2))
    engine.submit(twins)
    odd = (make_spec(2, 5, request_id="odd"), make_spec(3, 5, request_id="odd", max_tokens=99))
    engine.submit(odd)
    reported = engine.step()
    assert [(end.key, end.reason.name) for end in reported.ends] == [
        (1, "REQUEST_ID_IN_USE"),
        (1, "REQUEST_ID_IN_USE"),
        (2, "PROMPT_TOO_LONG"),
        (3, "PROMPT_TOO_LONG"),
    ]
    engine.check_integrity()


class ScriptedExecutor(NullExecutor):
    """An executor whose latest result a test may replace before it is collected."""

    def replace(self, result: StepResult) -> None:
        self.results[-1] = result


def scripted(depth: int = 1) -> tuple[Engine, ScriptedExecutor]:
    executor = ScriptedExecutor(make_info(pipeline_depth=depth))
    return Engine(executor, SchedulerConfig(max_num_batched_tokens=16), FakeClock()), executor


def drive(engine: Engine, executor: ScriptedExecutor, result: StepResult) -> None:
    batch = engine.schedule(0.0)
    assert batch is not None
    executor.launch(batch)
    executor.collect()
    engine.update(result, 0.0)
    engine.check_integrity()


def int32(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(values, dtype=np.int32)


def test_a_result_with_a_token_too_few_is_an_error() -> None:
    engine, _ = scripted()
    for key in (1, 2):
        engine.submit((make_spec(key, 3),))
    batch = engine.schedule(0.0)
    assert batch is not None
    with pytest.raises(ValueError, match="2 slots sampled, 1 tokens returned"):
        engine.update(StepResult(slots=batch.sampled_slots, tokens=int32(7)), 0.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_fails_alone_does_not_affect_the_rest(depth: int) -> None:
    engine, executor = scripted(depth)
    for key in (1, 2):
        engine.submit((make_spec(key, 3, max_tokens=3),))
    failure = SlotFailure(slot=0, detail="nan")
    drive(engine, executor, StepResult(slots=int32(1), tokens=int32(7), failures=(failure,)))
    reported = run_until_idle(engine)
    assert outputs(reported) == {2: [7, 7, 7]}
    assert ends(reported)[1] == Failed(
        key=1,
        at_s=0.0,
        reason=FailureReason.EXECUTOR_REQUEST_FAILED,
        request_id="request-1",
        detail="nan",
        residency=Residency(num_chunks=1, num_steps=1, min_batch_size=2, max_batch_size=2),
    )


def test_the_blocks_of_a_failed_request_are_not_reused() -> None:
    engine, executor = scripted()
    engine.submit((make_spec(1, 9, max_tokens=3),))
    drive(engine, executor, StepResult(slots=int32(0), tokens=int32(7)))
    failure = SlotFailure(slot=0, detail="nan")
    drive(engine, executor, StepResult(slots=int32(), tokens=int32(), failures=(failure,)))
    assert engine.cache.pool.num_cached == 0
    run_until_idle(engine)


def test_a_step_without_a_token_is_repeated_and_several_tokens_advance_at_once() -> None:
    engine, executor = scripted()
    for key, prompt in ((1, 3), (2, 4)):
        engine.submit((make_spec(key, prompt, max_tokens=6, stop_ids=(9,)),))
    both = int32(0, 1)
    drive(engine, executor, StepResult(slots=both, tokens=int32(5, 5, 5), counts=int32(0, 3)))
    drive(engine, executor, StepResult(slots=both, tokens=int32(6, 9, 6), counts=int32(1, 2)))
    reported = run_until_idle(engine)
    assert outputs(reported) == {1: [6, 7, 7, 7, 7, 7], 2: [5, 5, 5, 9]}
    assert ends(reported)[2].reason is FinishReason.STOP


def test_many_tokens_at_once_get_their_blocks() -> None:
    engine, executor = scripted()
    engine.submit((make_spec(1, 3, max_tokens=30),))
    tokens = int32(*range(20))
    drive(engine, executor, StepResult(slots=int32(0), tokens=tokens, counts=int32(20)))
    reported = run_until_idle(engine)
    assert outputs(reported)[1] == [*range(20), *[7] * 10]


def test_a_step_that_fails_late_leaves_no_block_to_reuse() -> None:
    engine, executor = scripted(depth=2)
    engine.submit((make_spec(1, 9, max_tokens=3),))
    batch = engine.schedule(0.0)
    assert batch is not None
    executor.launch(batch)
    engine.cancel(1)
    engine.check_integrity()
    failure = SlotFailure(slot=0, detail="nan")
    engine.update(StepResult(slots=int32(), tokens=int32(), failures=(failure,)), 0.0)
    assert engine.cache.pool.num_cached == 0
    assert engine.step().ends[0].reason is FinishReason.CANCELLED


def test_results_of_earlier_steps_are_kept_while_another_is_in_flight() -> None:
    engine, executor = scripted(depth=2)
    engine.submit((make_spec(1, 9, max_tokens=30),))
    for _ in range(9):
        engine.step()
    engine.cancel(1)
    # 9 + 8 tokens are known; the step under way computes the last of them, and is not trusted yet.
    assert engine.cache.pool.num_cached == 4
    run_until_idle(engine)
    assert executor.released == [0]


def test_an_executor_is_notified_of_a_release_though_nothing_follows() -> None:
    engine, executor = make_engine()
    engine.submit((make_spec(1, 3, max_tokens=9),))
    engine.step()
    engine.cancel(1)
    assert executor.released == []
    run_until_idle(engine)
    assert executor.released == [0]
    assert len(executor.batches) == 1


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (StepResult(slots=int32(0), tokens=int32(7, 7)), "announced"),
        (StepResult(slots=int32(5), tokens=int32(7)), "did not sample"),
        (StepResult(slots=int32(0), tokens=int32(7), counts=int32(2)), "announced"),
    ],
)
def test_a_result_that_does_not_fit_is_an_error(result: StepResult, message: str) -> None:
    engine, executor = scripted()
    engine.submit((make_spec(1),))
    with pytest.raises(ValueError, match=message):
        drive(engine, executor, result)


def test_a_missing_answer_is_an_error_when_steps_overlap() -> None:
    engine, executor = scripted(depth=2)
    engine.submit((make_spec(1),))
    with pytest.raises(ValueError, match="no tokens"):
        drive(engine, executor, StepResult(slots=int32(), tokens=int32()))


def test_an_executor_error_is_raised_and_close_closes_the_executor() -> None:
    class Dead(NullExecutor):
        def collect(self) -> StepResult:
            raise RuntimeError("gone")

    executor = Dead(make_info())
    engine = Engine(executor, SchedulerConfig(max_num_batched_tokens=16), FakeClock())
    engine.submit((make_spec(1),))
    with pytest.raises(RuntimeError, match="gone"):
        engine.step()
    engine.close()
    assert executor.is_closed


def test_an_idle_engine_reports_nothing() -> None:
    engine, executor = make_engine()
    assert not engine.has_work
    assert engine.step().is_empty
    assert not executor.batches


def test_finished_by_the_front_is_a_stop() -> None:
    engine, _ = make_engine()
    engine.submit((make_spec(1, 3, max_tokens=9),))
    engine.step()
    engine.cancel(1, FinishReason.STOP)
    residency = Residency(num_chunks=1, num_steps=1, min_batch_size=1, max_batch_size=1)
    assert engine.step().ends == (
        Completed(key=1, at_s=0.0, reason=FinishReason.STOP, residency=residency),
    )
