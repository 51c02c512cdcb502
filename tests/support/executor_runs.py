"""Engines over one kind of executor, and a check of every result against its batch."""

import select
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.create import create_executor
from penstock.scheduler.batch import Batch, StepResult, TokenLogprobs
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Completed, Failed, Preempted
from penstock.scheduler.executor import Executor, ExecutorInfo
from penstock.scheduler.request import RequestSpec
from support.core import BLOCK_SIZE
from support.timeout import TEST_TIMEOUT_S

MAX_SEQ_LEN = 64


class CheckedExecutor:
    """Forwards every call to another executor, and checks each result against its batch.
    `max_rows`: the largest number of rows of a batch so far.
    """

    def __init__(self, executor: Executor) -> None:
        self.inner = executor
        self._expected: list[NDArray[np.int32]] = []
        self.max_rows = 0
        self.num_prefill_rows = 0

    @property
    def info(self) -> ExecutorInfo:
        return self.inner.info

    @property
    def ready_fd(self) -> int | None:
        return self.inner.ready_fd

    def launch(self, batch: Batch) -> None:
        self._expected.append(batch.sampled_slots.copy())
        self.max_rows = max(self.max_rows, batch.num_rows)
        self.num_prefill_rows += batch.num_rows - batch.num_decodes
        self.inner.launch(batch)

    def collect(self) -> StepResult:
        result = self.inner.collect()
        assert result.tokens.dtype == np.int32
        assert ((result.tokens >= 0) & (result.tokens < self.info.vocab_size)).all()
        failed = [failure.slot for failure in result.failures]
        if self.info.is_self_paced:
            self._check_result(result, failed)
            return result
        answered = [slot for slot in self._expected.pop(0).tolist() if slot not in failed]
        assert result.slots.tolist() == answered
        assert result.counts is None
        assert len(result.tokens) == len(answered)
        return result

    def _check_result(self, result: StepResult, failed: list[int]) -> None:
        """Check that the result of a self-paced executor (one that does its own batching) contains
        only running requests, each once, with its tokens.
        """
        slots = result.slots.tolist()
        assert len({*slots, *failed}) == len(slots) + len(failed)
        if self._expected:
            assert {*slots, *failed} <= set(self._expected[-1].tolist())
        assert result.counts is not None
        assert (result.counts > 0).all()
        assert int(result.counts.sum()) == len(result.tokens)

    def close(self) -> None:
        self.inner.close()


@dataclass(slots=True)
class Outcome:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)
    end: Completed | Failed | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class Harness:
    """Builds engines over one kind of executor and runs requests through them."""

    def __init__(
        self, config: ExecutorConfig, create: Callable[[ExecutorConfig], Executor] = create_executor
    ) -> None:
        self.config = config
        self._create = create
        self._built: list[Executor] = []

    def executor(self, *, num_blocks: int = 64, max_num_seqs: int = 8) -> CheckedExecutor:
        limits: dict[str, Any] = {
            "num_blocks": num_blocks,
            "max_num_seqs": max_num_seqs,
            "block_size": BLOCK_SIZE,
            "max_seq_len": MAX_SEQ_LEN,
        }
        if self.config.kind is ExecutorKind.TRTLLM:
            old = self.config.trtllm
            pages = replace(
                old.kv_cache_config, max_tokens=num_blocks * BLOCK_SIZE, tokens_per_block=BLOCK_SIZE
            )
            new = replace(old, max_batch_size=max_num_seqs, max_seq_len=MAX_SEQ_LEN)
            limits = {"trtllm": replace(new, kv_cache_config=pages)}
        checked = CheckedExecutor(self._create(replace(self.config, **limits)))
        self._built.append(checked)
        return checked

    def run(
        self,
        *specs: RequestSpec,
        budget: int = 256,
        stagger: bool = False,
        executor: CheckedExecutor | None = None,
        after_step: Callable[[], None] | None = None,
        **limits: int,
    ) -> list[Outcome]:
        """Submit all requests at once or, with `stagger`, one before every second step; step until
        idle, and return the outcomes in order of `specs`.

        `budget`: maximum number of tokens per step. `after_step`: called after every step; without
        it, the harness waits after a step until a self-paced executor has a result.
        """
        checked = executor or self.executor(**limits)
        engine = Engine(checked, SchedulerConfig(max_num_batched_tokens=budget), lambda: 0.0)
        outcomes = {spec.key: Outcome() for spec in specs}
        pending = list(specs)
        for step in range(2000):
            while pending and (not stagger or step % 2 == 0):
                engine.submit((pending.pop(0),))
                if stagger:
                    break
            if not (pending or engine.has_work):
                break
            collect_events(engine, outcomes)
            engine.check_integrity()
            if after_step is not None:
                after_step()
            elif engine.ready_fd is not None and engine.has_work:
                assert select.select([engine.ready_fd], [], [], TEST_TIMEOUT_S)[0], "no news"
        assert not engine.has_work
        assert all(outcome.end is not None for outcome in outcomes.values())
        return list(outcomes.values())

    def close(self) -> None:
        for executor in self._built:
            executor.close()


def collect_events(engine: Engine, outcomes: dict[int, Outcome]) -> None:
    events = engine.step()
    for change in events.changes:
        outcome = outcomes[change.key]
        outcome.num_preemptions += isinstance(change, Preempted)
        if isinstance(change, Admitted):
            outcome.num_cached_tokens = change.num_cached_tokens
    for row, (key, token) in enumerate(
        zip(events.keys.tolist(), events.tokens.tolist(), strict=True)
    ):
        outcomes[key].tokens.append(token)
        if events.logprobs is not None:
            outcomes[key].logprobs.append(events.logprobs.take(slice(row, row + 1)))
    for key, first, logprobs in events.prompt_logprobs:
        for offset, value in enumerate(logprobs.chosen.tolist()):
            outcomes[key].prompt_logprobs[first + offset] = value
    for end in events.ends:
        assert outcomes[end.key].end is None
        outcomes[end.key].end = end
