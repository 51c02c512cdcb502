"""A mixed batch through the real engine and the torch executor, compared with `NaiveModel`."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Completed, Preempted, StepEvents
from penstock.scheduler.executor import Executor
from penstock.scheduler.request import RequestSpec, SamplingParams
from support.core import FakeClock, ends, make_spec, outputs
from support.torch_models import VOCAB_SIZE, NaiveModel

BLOCK_SIZE = 16
NUM_SLOTS = 5
AMPLE_BLOCKS = 160
"""Enough blocks that no request is preempted."""
SCARCE_BLOCKS = 26
"""Enough blocks for the longest request alone, but not for five such requests."""
_LENGTHS = (1, 40, 300, 2, 15, 16, 17, 33, 90, 64, 150, 48)
_SHARED = 48
"""Tokens that all longer prompts share at the start: three full blocks."""


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """The scheduler features in use: chunked prefill, prefix caching, preemption."""

    chunked: bool
    prefix: bool
    preempt: bool

    def __str__(self) -> str:
        on = [name for name in ("chunked", "prefix", "preempt") if getattr(self, name)]
        return "+".join(on) or "plain"


FEATURE_SETS = [FeatureSet(*used) for used in itertools.product((False, True), repeat=3)]


def mixed_specs(*, hashed: bool, sampling: SamplingParams | None = None) -> list[RequestSpec]:
    """Return twelve requests with 1 to 300 prompt tokens and 14 to 36 output tokens."""
    random = np.random.default_rng(1)
    shared = random.integers(3, VOCAB_SIZE, _SHARED).tolist()
    specs = []
    for key, length in enumerate(_LENGTHS, start=1):
        own = random.integers(3, VOCAB_SIZE, length).tolist()
        specs.append(
            make_spec(
                key,
                (shared + own)[:length] if length > _SHARED else own,
                max_tokens=12 + 2 * key,
                hashed=hashed,
                block_size=BLOCK_SIZE,
                sampling=sampling or SamplingParams(temperature=0.0),
            )
        )
    return specs


def run_mixed(executor: Executor, specs: list[RequestSpec], *, budget: int) -> list[StepEvents]:
    """Submit one request before each of the first two steps, then one before every second step; run
    until all have ended, and return the events.

    The engine's integrity is checked after every step.
    """
    config = SchedulerConfig(max_num_batched_tokens=budget)
    engine = Engine(executor, config, FakeClock())
    waiting = list(specs)
    reported: list[StepEvents] = []
    for step in range(5_000):
        if waiting and (step < 2 or step % 2 == 0):
            engine.submit((waiting.pop(0),))
        if not waiting and not engine.has_work:
            return reported
        reported.append(engine.step())
        engine.check_integrity()
    raise AssertionError("the engine does not come to rest")


def check_feature_set(way: FeatureSet, make: Callable[[int], Executor], naive: NaiveModel) -> None:
    """Check that the greedy outputs equal those of the naive model, and that preemption and prefix
    caching were used only if `way` has them. `make`: creates an executor with a number of blocks.
    """
    specs = mixed_specs(hashed=way.prefix)
    executor = make(SCARCE_BLOCKS if way.preempt else AMPLE_BLOCKS)
    reported = run_mixed(executor, specs, budget=24 if way.chunked else 2048)
    changes = [change for events in reported for change in events.changes]
    assert any(isinstance(change, Preempted) for change in changes) == way.preempt
    first_cached = [c.num_cached_tokens for c in changes if isinstance(c, Admitted)]
    assert any(first_cached) == way.prefix
    assert all(isinstance(end, Completed) for end in ends(reported).values())
    reported_tokens = outputs(reported)
    assert len({token for tokens in reported_tokens.values() for token in tokens}) > 50
    wrong = [spec.key for spec in specs if not is_naive(naive, spec, reported_tokens[spec.key])]
    assert wrong == []


def is_naive(naive: NaiveModel, spec: RequestSpec, output: list[int]) -> bool:
    return len(output) == spec.max_tokens and naive.is_greedy(spec.prompt_ids.tolist(), output)


def prompt_error(executor: Executor, naive: NaiveModel, num_tokens: int = 400) -> float:
    """Return the relative error of a long prompt's log probabilities, compared with the naive
    model.
    """
    ids = np.random.default_rng(0).integers(3, VOCAB_SIZE, num_tokens)
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
    spec = make_spec(1, ids.tolist(), max_tokens=1, sampling=sampling, hashed=False)
    events = run_mixed(executor, [spec], budget=2048)
    found = np.concatenate(
        [part.chosen for reported in events for _, _, part in reported.prompt_logprobs]
    )
    logits = naive.logits(ids.tolist())[:-1].astype(np.float64)
    expected = logits[np.arange(num_tokens - 1), ids[1:]] - np.log(np.exp(logits).sum(-1))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
