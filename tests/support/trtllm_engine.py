"""A scheduler's engine with the TensorRT-LLM executor and a stand-in for TensorRT-LLM
(tests/fakes), stepped by the test.

Only the test advances the three clocks: the clock of the scheduler and the executor (`clock`), the
clock of the event loop (`pass_loop_time`) and the stand-in's iterations (`iterate`). Every call
returns when the work that it caused is done, so no test depends on timing.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import select
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.executor.config import ExecutorConfig, ExecutorKind
from penstock.executor.trtllm.config import (
    CapacityPolicy,
    KvCacheSettings,
    SchedulerSettings,
    TrtllmConfig,
    WatchSettings,
)
from penstock.executor.trtllm.executor import TrtllmExecutor
from penstock.executor.trtllm.loop_thread import LoopThread
from penstock.executor.trtllm.streams import Streams
from penstock.scheduler.config import AdmissionPolicy, SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.request import FailureReason, FinishReason, RequestSpec, SamplingParams
from support.core import BLOCK_SIZE, FakeClock, make_spec
from support.executor_runs import Outcome, collect_events
from support.timeout import TEST_TIMEOUT_S
from support.trtllm_folders import hugging_face_folder

if TYPE_CHECKING:
    from tensorrt_llm.executor.request import GenerationRequest
    from tensorrt_llm.fake_control import EngineControl, View

VOCAB = 4096
MAX_SEQ_LEN = 64
RESPONSE_TIMEOUT_S = 30.0
ABORT_TIMEOUT_S = 5.0
HEALTH_INTERVAL_S = 1.0
_NUM_ITERATIONS_TO_SETTLE = 12


def fake_module(name: str) -> Any:
    """Return a module of the stand-in; only while the fixture `fake_trtllm` is in use."""
    return importlib.import_module(f"tensorrt_llm.{name}")


def _settle(thread: LoopThread) -> None:
    async def settled() -> None:
        for _ in range(_NUM_ITERATIONS_TO_SETTLE):
            await asyncio.sleep(0)

    thread.run(settled(), TEST_TIMEOUT_S)


def stepped_by_hand(executor: TrtllmExecutor) -> Callable[[], None]:
    """Pause the newest engine; return a function that runs one iteration of it, with all that was
    submitted before.
    """
    control: EngineControl = fake_module("fake_control").engine()
    control.pause()

    def iterate() -> None:
        _settle(executor._engine._thread)
        control.step()
        _settle(executor._engine._thread)

    return iterate


class TrtllmHarness:
    """A scheduler over the TensorRT-LLM executor, with small limits. The stand-in of TensorRT-LLM
    is paused after the start and its event loop's clock is stopped, unless `is_free`.

    `fake`: settings of the stand-in. `scheduler`, `watch`: fields of SchedulerConfig and
    WatchSettings. `config`: other fields of TrtllmConfig.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fake: dict[str, Any] | None = None,
        scheduler: dict[str, Any] | None = None,
        watch: dict[str, Any] | None = None,
        num_blocks: int = 64,
        policy: CapacityPolicy = CapacityPolicy.GUARANTEED_NO_EVICT,
        is_free: bool = False,
        **config: Any,
    ) -> None:
        control = fake_module("fake_control")
        control.configure(**(fake or {}))
        limits_s: dict[str, Any] = {
            "response_timeout_s": RESPONSE_TIMEOUT_S,
            "abort_timeout_s": ABORT_TIMEOUT_S,
            "limits_timeout_s": TEST_TIMEOUT_S,
            "shutdown_timeout_s": TEST_TIMEOUT_S,
            **(watch or {}),
        }
        pages = KvCacheSettings(max_tokens=num_blocks * BLOCK_SIZE, tokens_per_block=BLOCK_SIZE)
        self.config = TrtllmConfig(
            kv_cache_config=pages,
            scheduler_config=SchedulerSettings(capacity_scheduler_policy=policy),
            watch=WatchSettings(**limits_s),
            max_seq_len=MAX_SEQ_LEN,
            **{"max_batch_size": 4, "max_num_tokens": 256, **config},
        )
        self.clock = FakeClock()
        model = hugging_face_folder(folder, vocab_size=VOCAB, max_position_embeddings=MAX_SEQ_LEN)
        whole = ExecutorConfig(kind=ExecutorKind.TRTLLM, model_path=model, trtllm=self.config)
        self.executor = TrtllmExecutor(whole, self.clock)
        self.control: EngineControl = control.engine()
        self._num_warm_ups = len(self.control.submitted)
        settings = {
            "max_num_batched_tokens": self.config.max_num_tokens,
            "admission_policy": AdmissionPolicy[policy.name],
            **(scheduler or {}),
        }
        self.engine = Engine(self.executor, SchedulerConfig(**settings), self.clock)
        self.outcomes: dict[int, Outcome] = defaultdict(Outcome)
        self._loop_offset_s = 0.0
        if not is_free:
            self.hold_loop_time()
            self.control.pause()

    @property
    def thread(self) -> LoopThread:
        return self.executor._engine._thread

    @property
    def streams(self) -> Streams:
        return self.executor._engine.streams

    @property
    def llm(self) -> Any:
        return self.executor._engine._llm

    @property
    def num_in_engine(self) -> int:
        """Number of requests that TensorRT-LLM has not released, by the executor's accounting."""
        return self.executor._blocks.num_in_engine

    @property
    def submitted(self) -> Sequence[GenerationRequest]:
        """The requests submitted to the engine, in order, without limit probes."""
        return self.control.submitted[self._num_warm_ups :]

    @property
    def submitted_keys(self) -> list[int]:
        """The keys of the submitted requests, derived from their prompts. `make_spec` chooses a
        prompt by key.
        """
        return [item.prompt_token_ids[0] // 100 for item in self.submitted]

    def view(self) -> View:
        return self.control.view()

    # The scheduler's side

    def submit(self, *specs: RequestSpec) -> None:
        for spec in specs:
            self.engine.submit((spec,))

    def turn(self) -> None:
        """Run one step of the scheduler, and the work that it causes on the event loop."""
        collect_events(self.engine, self.outcomes)
        self.engine.check_integrity()
        self.settle()

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        assert self.engine.ready_fd is not None
        return bool(select.select([self.engine.ready_fd], [], [], timeout_s)[0])

    # The event loop

    def settle(self) -> None:
        """Wait until the event loop has no work."""
        _settle(self.thread)

    def hold_loop_time(self) -> None:
        """Stop the event loop's clock; only `pass_loop_time` advances it."""
        stopped_at_s = self.thread.loop.time()

        def time_s() -> float:
            return stopped_at_s + self._loop_offset_s

        self.thread.loop.call_soon_threadsafe(setattr, self.thread.loop, "time", time_s)
        self.settle()

    def pass_loop_time(self, seconds: float) -> None:
        """Advance the loop's clock; run everything that is due within `seconds`."""
        later_s = self._loop_offset_s + seconds
        self.thread.loop.call_soon_threadsafe(setattr, self, "_loop_offset_s", later_s)
        self.settle()

    def stray_tasks(self) -> list[str]:
        """Describe the loop's tasks, without the engine's permanent tasks and waits for events."""

        async def found() -> list[str]:
            others = asyncio.all_tasks() - {*self.executor._engine._tasks, asyncio.current_task()}
            return [repr(task) for task in others if "Event.wait" not in repr(task)]

        return self.thread.run(found(), TEST_TIMEOUT_S)

    # The stand-in

    def iterate(self, count: int = 1) -> None:
        """Run `count` iterations of the stand-in for TensorRT-LLM, which is paused. After each
        iteration, wait until the event loop has no work.
        """
        for _ in range(count):
            self.control.step()
            self.settle()

    def round(self, count: int = 1) -> None:
        """Run a scheduler step and an iteration of the stand-in `count` times, then one more
        step.
        """
        for _ in range(count):
            self.turn()
            self.iterate()
        self.turn()

    def run_until_idle(self, max_rounds: int = 500) -> None:
        for _ in range(max_rounds):
            if not (self.engine.has_work or self.num_in_engine):
                return
            self.round()
        raise AssertionError(f"still busy after {max_rounds} rounds")

    def run_free(self) -> None:
        """Let the stand-in run until neither the scheduler nor it has a request."""
        self.control.resume()
        for _ in range(20_000):
            collect_events(self.engine, self.outcomes)
            if not (self.engine.has_work or self.num_in_engine):
                return
            assert self.is_ready(TEST_TIMEOUT_S) or not self.num_in_engine, "no news"
        raise AssertionError("still busy")

    def join_engine_loop(self) -> None:
        self.control._engine._thread.join(TEST_TIMEOUT_S)
        assert not self.view().is_alive

    # The results

    def tokens(self, key: int) -> list[int]:
        return self.outcomes[key].tokens

    def finish(self, key: int) -> FinishReason | None:
        end = self.outcomes[key].end
        return end.reason if isinstance(end, Completed) else None

    def failure(self, key: int) -> FailureReason | None:
        end = self.outcomes[key].end
        return end.reason if isinstance(end, Failed) else None

    def check_clean(self, *, num_lost: int = 0) -> None:
        """Check that nothing is left of any request; `num_lost`: number of aborts that the engine
        never answered.
        """
        assert not self.engine.has_work
        self.engine.check_integrity()
        assert self.engine.cache.pool.num_used == 0
        account = self.executor._blocks
        assert (account.num_in_engine, account.num_waiting, account.num_aborted_blocks) == (0, 0, 0)
        assert not self.executor._submitted
        assert len(self.streams) == 0
        assert self.executor.num_unconfirmed_aborts == num_lost
        assert self.stray_tasks() == []
        view = self.view()
        assert (view.active, view.waiting, view.num_used_blocks) == ((), (), 0)
        assert view.num_results <= num_lost

    def close(self) -> None:
        self.control.release()
        self.executor.close()


BuildHarness = Callable[..., TrtllmHarness]
"""Creates a TrtllmHarness, which a fixture closes."""


def reference(harness: TrtllmHarness, prompt: Sequence[int], count: int) -> list[int]:
    """Return the stand-in's greedy output for a prompt, computed by its model."""
    model = harness.control._engine.limits.model
    advance = fake_module("_torch.pyexecutor.hashed_model").advance
    state = advance(0, list(prompt))
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(model.top_token(state))
        state = advance(state, (tokens[-1],))
    return tokens


def greedy_spec(key: int, prompt: int | Sequence[int] = 5, **fields: Any) -> RequestSpec:
    """Return a spec of `make_spec` with greedy sampling, so that its output is always the same."""
    return make_spec(key, prompt, sampling=SamplingParams(temperature=0.0), **fields)


def wrapped(monkeypatch: Any, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace the method `name` of `owner` by one that calls `around(original, *arguments)` and has
    the signature of the original.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return around(original, *arguments, **keywords)

    monkeypatch.setattr(owner, name, call)
