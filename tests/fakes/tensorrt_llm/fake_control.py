"""Controls of the stand-in for tests. The real package has no such module.

Owns the settings of future engines (set by `configure` in this process, in others by the
environment variable TLLM_FAKE_CONTROL, a JSON object of the same names) and a handle on every
engine that was built.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
    from tensorrt_llm.executor.proxy import GenerationExecutorProxy
    from tensorrt_llm.executor.request import GenerationRequest

VARIABLE = "TLLM_FAKE_CONTROL"


@dataclass(slots=True, kw_only=True)
class Settings:
    """The settings of one engine; those that are read while it runs may be changed while it runs.

    Times in seconds. Iterations count from 1. Faults by iteration fire when a request arrives in
    it; faults by token fire each time a prompt contains the token. `num_blocks`: the simulated
    GPU's capacity; `free_blocks_drift` is added to the free blocks in the statistics. `stats`:
    "push" as before NVIDIA PR #9980, "rpc" as after it: statistics are fetched, and the caller
    blocks. `slip_token`: a prompt with it makes its result raise an AssertionError out of its
    iteration. `guided_error`: the grammar compiler's message for a guide that it rejects, instead
    of the stand-in's own. `shutdown_s`: maximum time that `shutdown` blocks. `worker_lifetime_s`:
    end of the `worker_process` if nothing ends it before.
    """

    step_s: float = 0.0
    is_paused: bool = False
    load_s: float = 0.0
    num_blocks: int = 1024
    free_blocks_drift: int = 0
    has_stats: bool = True
    stats: str = "push"
    shutdown_s: float = 0.0
    build_error: str = ""
    is_death_seen_by_health: bool = False
    fail_tokens: list[int] = field(default_factory=list)
    fail_at_output: int = -1
    fail_message: str = "forward failed"
    slip_token: int = -1
    guided_error: str = ""
    kill_loop_at: int = 0
    kill_loop_token: int = -1
    fatal_at: int = 0
    fatal_token: int = -1
    hang_token: int = -1
    worker_process: bool = False
    worker_lifetime_s: float = 60.0
    is_worker_death_fatal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state of an engine at one moment. Ids are those of the results."""

    iteration: int
    waiting: tuple[int, ...]
    active: tuple[int, ...]
    num_used_blocks: int
    num_results: int
    num_unread_stats: int
    is_alive: bool


class EngineControl:
    """A handle on one engine. Its methods may be called from any thread."""

    def __init__(self, engine: PyExecutor, proxy: GenerationExecutorProxy) -> None:
        self._engine = engine
        self._proxy = proxy

    @property
    def settings(self) -> Settings:
        """The live settings."""
        return self._engine.settings

    @property
    def submitted(self) -> Sequence[GenerationRequest]:
        """The last requests in the order of submission."""
        return tuple(self._proxy.submitted)

    @property
    def aborted(self) -> Sequence[int]:
        """Ids in the order of the calls of abort."""
        return tuple(self._proxy.aborted)

    @property
    def shutdown_threads(self) -> Sequence[str]:
        """Names of the threads that have run or still run a shutdown."""
        return tuple(self._proxy.shutdown_threads)

    def view(self) -> View:
        """Return the engine's current state; between iterations while it is paused."""
        engine, proxy = self._engine, self._proxy
        return View(
            iteration=engine.iteration,
            waiting=tuple(engine.waiting),
            active=tuple(engine.active),
            num_used_blocks=engine.pool.num_used,
            num_results=proxy.num_results,
            num_unread_stats=proxy.num_unread_stats,
            is_alive=engine.is_alive,
        )

    def pause(self) -> None:
        """Run only the iterations of `step`."""
        self._engine.set_paused(True)

    def resume(self) -> None:
        """Run iterations without `step`."""
        self._engine.set_paused(False)

    def step(self, count: int = 1, timeout_s: float = 30.0) -> None:
        """Run `count` iterations of a paused engine, idle ones too, and return when they are done.

        Their responses have been delivered to the results by then. Raises TimeoutError if the
        engine is dead or hangs.
        """
        self._engine.run_iterations(count, timeout_s)

    def wait_for_iteration(self, iteration: int, timeout_s: float = 30.0) -> None:
        """Return once this iteration has ended. Raises TimeoutError otherwise."""
        self._engine.wait_for_iteration(iteration, timeout_s)

    def inject(self, fault: str) -> None:
        """Inject a fault into the next iteration, and run one even if idle.

        "kill" ends the loop silently, and no request gets a response; "fatal" ends the engine with
        an error that consumers receive; "hang" blocks until `release`; "fail_all" fails every
        active request.
        """
        self._engine.inject(fault)

    def release(self) -> None:
        """End a hang, and a blocking shutdown."""
        self._engine.released.set()


_settings = Settings()
_engines: list[EngineControl] = []


def configure(**changes: Any) -> None:
    """Change the settings of engines built from now on. Raises TypeError for an unknown name."""
    global _settings
    _settings = dataclasses.replace(_settings, **changes)


def settings_of_new_engine() -> Settings:
    """Return a copy for one engine: the configured settings, overridden by the environment
    variable."""
    return dataclasses.replace(_settings, **json.loads(os.environ.get(VARIABLE, "{}")))


def register(engine: EngineControl) -> None:
    _engines.append(engine)


def engine() -> EngineControl:
    """Return the engine built last."""
    return _engines[-1]
