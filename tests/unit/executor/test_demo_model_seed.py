"""The shipped model with default settings: a seed gives the same output alone and in a batch."""

from __future__ import annotations

import pytest

from penstock.executor.config import ExecutorConfig
from penstock.executor.models import resolve_model
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.request import RequestSpec, SamplingParams
from support.core import FakeClock, make_spec, outputs, run_until_idle


@pytest.fixture(scope="module")
def engine() -> Engine:
    pytest.importorskip("torch")
    from penstock.executor.torch.executor import TorchExecutor

    config = ExecutorConfig(model_path=resolve_model("demo"), max_num_seqs=8, num_blocks=128)
    return Engine(TorchExecutor(config), SchedulerConfig(max_num_batched_tokens=64), FakeClock())


def seeded(key: int, seed: int) -> RequestSpec:
    sampling = SamplingParams(temperature=1.0, seed=seed)
    prompt = [0, 400 + seed, 17, 900, 33]
    return make_spec(key, prompt, max_tokens=60, block_size=16, sampling=sampling)


def test_a_seed_says_the_same_alone_and_in_company(engine: Engine) -> None:
    together = [seeded(key, seed=key % 4) for key in range(1, 9)]
    for one in together:
        engine.submit((one,))
    in_company = outputs(run_until_idle(engine))

    for one in together[:4]:
        again = seeded(100 + one.key, seed=one.key % 4)
        engine.submit((again,))
        alone = outputs(run_until_idle(engine))[again.key]
        assert len(alone) == 60
        assert in_company[one.key] == alone
        assert in_company[one.key + 4] == alone
