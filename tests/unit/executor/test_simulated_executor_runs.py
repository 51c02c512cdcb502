"""The limits, step times and shutdown of the simulated executor, in an engine or in its own
process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.fault import Fault, FaultKind
from penstock.executor.models import resolve_model
from penstock.executor.simulated.clock import VirtualClock, WaitableClock
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.executor import ExecutorDied
from penstock.scheduler.request import RequestSpec


def build(
    *faults: Fault, depth: int = 1, clock: WaitableClock | None = None, **simulated: Any
) -> SimulatedExecutor:
    config = ExecutorConfig(
        kind=ExecutorKind.SIMULATED,
        pipeline_depth=depth,
        simulated=SimulatedConfig(faults=faults, **simulated),
    )
    return SimulatedExecutor(config, clock=clock)


def engine_of(executor: SimulatedExecutor, *, max_tokens: int) -> Engine:
    """Return an engine with one request, whose prompt has three tokens."""
    engine = Engine(executor, SchedulerConfig(), time.monotonic)
    prompt = np.array([5, 6, 7], dtype=np.int32)
    engine.submit((RequestSpec(key=1, request_id="a", prompt_ids=prompt, max_tokens=max_tokens),))
    return engine


def run(engine: Engine) -> None:
    for _ in range(100):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine does not come to rest")


def test_a_dead_executor_raises_at_each_further_step() -> None:
    executor = build(Fault(kind=FaultKind.EXECUTOR_DIES, at_step=2, detail="bus error"))
    engine = engine_of(executor, max_tokens=5)
    engine.step()

    with pytest.raises(ExecutorDied, match="bus error"):
        engine.step()
    with pytest.raises(ExecutorDied, match="bus error"):
        engine.step()


@pytest.mark.parametrize(
    "executor",
    [
        build(Fault(kind=FaultKind.HANG, at_step=1)),
        build(is_real_time=True, cost=CostModel(step_s=3600.0)),
        build(Fault(kind=FaultKind.SLOW_STEP, at_step=1, seconds=3600.0)),
    ],
    ids=["hang", "long step", "slow step"],
)
def test_close_ends_a_step_that_waits(executor: SimulatedExecutor) -> None:
    engine = engine_of(executor, max_tokens=5)
    closer = threading.Thread(target=executor.close)
    closer.start()

    with pytest.raises(ExecutorDied, match="closed"):
        engine.step()

    closer.join()


def test_virtual_time_is_the_cost_model() -> None:
    clock = VirtualClock(100.0)
    cost = CostModel(step_s=1.0, prefill_token_s=0.1, decode_slot_s=0.01, context_token_s=0.001)
    slow = Fault(kind=FaultKind.SLOW_STEP, at_step=2, seconds=5.0)
    engine = engine_of(build(slow, clock=clock, cost=cost), max_tokens=2)

    engine.step()
    after_prefill_s = clock()
    engine.step()

    assert after_prefill_s == pytest.approx(101.303)
    assert clock() == pytest.approx(101.303 + 6.014)


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_run_one_after_the_other_at_any_depth(depth: int) -> None:
    clock = VirtualClock()
    cost = CostModel(step_s=1.0, prefill_token_s=0.0, decode_slot_s=0.0, context_token_s=0.0)

    run(engine_of(build(clock=clock, cost=cost, depth=depth), max_tokens=5))

    assert clock() == 5.0


def test_limits_come_from_the_model_folder(tmp_path: Path) -> None:
    limits = {"vocab_size": 77, "max_position_embeddings": 123}
    (tmp_path / "config.json").write_text(json.dumps(limits))

    info = SimulatedExecutor(
        ExecutorConfig(
            kind=ExecutorKind.SIMULATED, model_path=tmp_path, kv_cache_bytes=5 * 16 * 65_536 + 1
        )
    ).info

    assert (info.vocab_size, info.max_seq_len, info.num_blocks) == (77, 123, 5)


@pytest.mark.parametrize("is_readable", [True, False])
def test_the_generated_text_is_readable_unless_all_ids_are_generated(is_readable: bool) -> None:
    folder = resolve_model("demo")
    executor = SimulatedExecutor(
        ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            model_path=folder,
            simulated=SimulatedConfig(is_readable=is_readable),
        )
    )
    engine = engine_of(executor, max_tokens=200)
    tokens: list[int] = []
    while engine.has_work:
        tokens += engine.step().tokens.tolist()

    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens)
    assert (text.isascii() and text.isprintable()) is is_readable
    assert len(tokens) == 200


def test_a_cache_of_no_block_is_rejected() -> None:
    with pytest.raises(ValueError, match="kv_cache_mib must be at least one block"):
        SimulatedExecutor(ExecutorConfig(kind=ExecutorKind.SIMULATED, kv_cache_bytes=1))


@pytest.mark.parametrize("kind", [FaultKind.EXTRA_TOKENS, FaultKind.NO_TOKENS])
def test_token_counts_other_than_one_are_rejected_if_steps_overlap(kind: FaultKind) -> None:
    with pytest.raises(ValueError, match="pipeline_depth must be 1"):
        build(Fault(kind=kind, at_step=1), depth=2)


def test_a_process_exits_as_scripted() -> None:
    program = (
        "import numpy as np\n"
        "from penstock.executor.config import ExecutorConfig\n"
        "from penstock.server.settings.json_values import from_json_value\n"
        "from penstock.executor.simulated.executor import SimulatedExecutor\n"
        "from penstock.scheduler.batch import Batch\n"
        "from penstock.scheduler.slot_arrays import SlotArrays\n"
        "fault = {'kind': 'process_exits', 'at_step': 1, 'exit_code': 9}\n"
        "executor = SimulatedExecutor(\n"
        "    from_json_value(\n"
        "        ExecutorConfig, {'kind': 'simulated', 'simulated': {'faults': [fault]}}))\n"
        "arrays = SlotArrays(num_slots=64, max_seq_len=64, block_size=16)\n"
        "none = np.zeros(0, np.int32)\n"
        "executor.launch(Batch(step=1, arrays=arrays, slots=none, num_tokens=none,\n"
        "    starts=none, num_decodes=0, sampled_slots=none))\n"
        "print('launched', flush=True)\n"
        "executor.collect()\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)

    assert (done.returncode, done.stdout) == (9, b"launched\n"), done.stderr.decode()
