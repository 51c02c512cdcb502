"""The engine launches steps and collects their results in a fixed order, and skips no step."""

import pytest

from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.executor import ExecutorInfo
from support.core import FakeClock, NullExecutor, make_info, make_spec, run_until_idle


class RecordingExecutor(NullExecutor):
    """Records the number of each launched step, and -1 for each collected result."""

    def __init__(self, info: ExecutorInfo) -> None:
        super().__init__(info)
        self.calls: list[int] = []

    def launch(self, batch: Batch) -> None:
        self.calls.append(batch.step)
        super().launch(batch)

    def collect(self) -> StepResult:
        self.calls.append(-1)
        return super().collect()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_plan_is_with_the_executor_before_the_last_result_is_taken(depth: int) -> None:
    """The engine launches as many steps as the pipeline is deep. From then on it collects one
    result before each launch.
    """
    executor = RecordingExecutor(make_info(pipeline_depth=depth))
    engine = Engine(executor, SchedulerConfig(max_num_batched_tokens=16), FakeClock())
    for key, num_prompt in ((1, 5), (2, 40), (3, 9)):
        engine.submit((make_spec(key, num_prompt, max_tokens=12),))
    run_until_idle(engine)
    launched = [call for call in executor.calls if call >= 0]
    assert launched == list(range(len(launched))), "numbered one after the other"
    assert executor.calls.count(-1) == len(launched), "each has its result"
    # While there is anything to run, as many are out as may be, and one more in turn.
    last = executor.batches[-1].step
    expected = list(range(depth))
    for step in range(depth, last + 1):
        expected += [-1, step]
    assert executor.calls[: len(expected)] == expected
