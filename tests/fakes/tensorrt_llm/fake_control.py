"""Functions with which tests control the stand-in. The real package has no such module.

`configure` sets the settings of future engines in this process; the environment variable
TLLM_FAKE_CONTROL, a JSON object with the same names, sets them in child processes. `engine` returns
the control of the engine that was built last.
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
    """The settings of one engine. Tests may change them while the engine runs, except settings that
    are read only when it is built.

    Times are in seconds, and iterations are counted from 1. A fault with an iteration
    (`kill_loop_at`, `fatal_at`) occurs when a request arrives in that iteration; a fault with a
    token (`kill_loop_token`, `fatal_token`, `hang_token`) occurs each time a request arrives whose
    prompt contains the token. `num_blocks`: the simulated GPU's capacity; `free_blocks_drift` is
    added to the free blocks in the statistics. `stats`: "push" if the engine sends statistics, as
    before NVIDIA PR #9980; "rpc" if the caller fetches them and is blocked meanwhile, as after it.
    `slip_token`: reading the result of a prompt that contains it raises an AssertionError.
    `guided_error`: the grammar compiler's message for a guide that it rejects, instead of the
    stand-in's own. `shutdown_s`: how long `shutdown` blocks unless `release` is called earlier.
    `worker_lifetime_s`: how long the `worker_process` runs unless something ends it earlier.
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
    """The state of an engine at one moment. Ids are the request ids of the results."""

    iteration: int
    waiting: tuple[int, ...]
    active: tuple[int, ...]
    num_used_blocks: int
    num_results: int
    num_unread_stats: int
    is_alive: bool


class EngineControl:
    """Controls one engine. Its methods may be called from any thread. `settings`: the settings of
    this engine; tests may change them as `Settings` states. `release` ends a hang, and lets a
    blocked shutdown return.
    """

    def __init__(self, engine: PyExecutor, proxy: GenerationExecutorProxy) -> None:
        self._engine, self._proxy, self.settings = engine, proxy, engine.settings
        self.pause, self.step, self.inject = engine.pause, engine.step, engine.inject
        self.wait_for_iteration = engine.wait_for_iteration
        self.release = engine.released.set

    @property
    def submitted(self) -> Sequence[GenerationRequest]:
        """The last MAX_REMEMBERED submitted requests, in the order of submission."""
        return tuple(self._proxy.submitted)

    @property
    def aborted(self) -> Sequence[int]:
        """The ids given to `abort`, in the order of the calls."""
        return tuple(self._proxy.aborted)

    @property
    def shutdown_threads(self) -> Sequence[str]:
        """Names of the threads that have run or still run a shutdown."""
        return tuple(self._proxy.shutdown_threads)

    def view(self) -> View:
        """Return the engine's current state. It is that between two iterations only while the
        engine is paused.
        """
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

    def resume(self) -> None:
        self._engine.pause(False)


_settings = Settings()
_engines: list[EngineControl] = []


def configure(**changes: Any) -> None:
    """Change the settings of engines built from now on. Raises TypeError for an unknown name."""
    global _settings
    _settings = dataclasses.replace(_settings, **changes)


def settings_of_new_engine() -> Settings:
    """Return a copy of the configured settings with the values of the environment variable."""
    return dataclasses.replace(_settings, **json.loads(os.environ.get(VARIABLE, "{}")))


def register(engine: EngineControl) -> None:
    _engines.append(engine)


def engine() -> EngineControl:
    """Return the control of the engine that was built last."""
    return _engines[-1]
