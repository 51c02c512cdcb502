"""Builders of specs and engines for tests of the scheduler, with a clock that the test advances and
an executor that returns its results at once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.simulated.clock import VirtualClock
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Admitted, Completed, Failed, Preempted, StepEvents
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.listener import EngineListener
from penstock.scheduler.quotas import QuotaAccounts
from penstock.scheduler.request import RequestSpec
from penstock.scheduler.sessions import SessionKey, Sessions
from penstock.scheduler.tenant_counters import TenantCounters
from penstock.scheduler.victims import VictimSelection

BLOCK_SIZE = 4
SALT = b"test"


def blocks_of(sessions: Sessions, key: SessionKey) -> tuple[int, ...]:
    session = sessions._sessions.get(key)
    return () if session is None else tuple(session.blocks)


def num_live_of(accounts: QuotaAccounts, tenant: str) -> int:
    row = accounts._row_of.get(tenant)
    return 0 if row is None else accounts._num_live[row]


def service_of(tenants: TenantCounters, name: str) -> float:
    """Return the weighted service of a tenant since the last rebase, 0 for an unknown tenant."""
    index = tenants._index_of.get(name)
    return 0.0 if index is None else float(tenants.service[index])


class FakeClock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class NullExecutor:
    """Generates `token(slot, position)` for every sampled slot; `position`: the index of the token
    in prompt and output together.

    `batches`: the received batches that have rows; `released`: the slots that batches released.
    """

    def __init__(
        self, info: ExecutorInfo, token: Callable[[int, int], int] = lambda _slot, _position: 7
    ) -> None:
        self.info = info
        self.ready_fd: int | None = None
        self.batches: list[Batch] = []
        self.released: list[int] = []
        self.results: deque[StepResult] = deque()
        self.is_closed = False
        self._token = token

    def launch(self, batch: Batch) -> None:
        if batch.num_rows:
            self.batches.append(batch)
        self.released.extend(batch.released)
        positions = (batch.starts + batch.num_tokens).tolist()
        ends = dict(zip(batch.slots.tolist(), positions, strict=True))
        tokens = [self._token(slot, ends[slot]) for slot in batch.sampled_slots.tolist()]
        self.results.append(
            StepResult(slots=batch.sampled_slots, tokens=np.array(tokens, dtype=np.int32))
        )

    def collect(self) -> StepResult:
        return self.results.popleft()

    def close(self) -> None:
        self.is_closed = True


def make_info(**changes: Any) -> ExecutorInfo:
    limits: dict[str, Any] = {
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_seq_len": 64,
        "pipeline_depth": 1,
        "block_size": BLOCK_SIZE,
    }
    return ExecutorInfo(name="null", vocab_size=1000, **(limits | changes))


def make_spec(
    key: int,
    prompt: int | Sequence[int] = 5,
    *,
    hashed: bool = True,
    block_size: int = BLOCK_SIZE,
    **options: Any,
) -> RequestSpec:
    """Return a spec. An int `prompt` is a number of tokens; if it is at most 100, prompts of
    different keys have no token in common. `options`: other fields of RequestSpec.
    """
    ids = list(range(key * 100, key * 100 + prompt)) if isinstance(prompt, int) else list(prompt)
    prompt_ids = np.array(ids, dtype=np.int32)
    made: dict[str, Any] = {"request_id": f"request-{key}", "max_tokens": 4}
    if hashed:
        made["hash_salt"] = SALT
        made["block_hashes"] = hash_blocks(prompt_ids, block_size, chain_root(SALT))
    return RequestSpec(key=key, prompt_ids=prompt_ids, **(made | options))


def make_engine(
    info: ExecutorInfo | None = None,
    config: SchedulerConfig | None = None,
    clock: Callable[[], float] | None = None,
    token: Callable[[int, int], int] = lambda _slot, _position: 7,
    listener: EngineListener | None = None,
    **settings: Any,
) -> tuple[Engine, NullExecutor]:
    """Return an engine and its NullExecutor, by default with few blocks and a clock at 0 s.

    `settings`: fields of ExecutorInfo if `info` is None, and fields of SchedulerConfig if `config`
    is None.
    """
    names = settings.keys() & {field.name for field in fields(ExecutorInfo)}
    limits = {name: settings.pop(name) for name in names}
    executor = NullExecutor(info or make_info(**limits), token)
    config = config or SchedulerConfig(**{"max_num_batched_tokens": 16, **settings})
    return Engine(executor, config, clock or FakeClock(), listener), executor


def simulated_executor(clock: VirtualClock, cost: CostModel, **limits: Any) -> SimulatedExecutor:
    """Return a simulated executor in virtual time. `limits`: other fields of ExecutorConfig."""
    settings: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_blocks": 1000,
        "max_num_seqs": 4,
        "max_seq_len": 2000,
        "simulated": SimulatedConfig(vocab_size=100, cost=cost),
    }
    config = ExecutorConfig(kind=ExecutorKind.SIMULATED, **(settings | limits))
    return SimulatedExecutor(config, clock=clock)


def run_until_idle(engine: Engine) -> list[StepEvents]:
    """Step until no work is left, with an integrity check after every step; return the events."""
    reported: list[StepEvents] = []
    for _ in range(10_000):
        if not engine.has_work:
            return reported
        reported.append(engine.step())
        engine.check_integrity()
    raise AssertionError("still busy")


def outputs(reported: Sequence[StepEvents]) -> dict[int, list[int]]:
    """Return the output tokens of each request, by key, in the order of the reports."""
    tokens: dict[int, list[int]] = {}
    for events in reported:
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            tokens.setdefault(key, []).append(token)
    return tokens


def ends(reported: Sequence[StepEvents]) -> dict[int, Completed | Failed]:
    """Return the end event of each request, by key. Raises AssertionError for a second end."""
    found: dict[int, Completed | Failed] = {}
    for events in reported:
        for end in events.ends:
            assert end.key not in found, f"{end.key} ended twice"
            found[end.key] = end
    return found


def changed(reported: Iterable[StepEvents], kind: type[Admitted | Preempted]) -> list[int]:
    return [
        change.key for events in reported for change in events.changes if isinstance(change, kind)
    ]


def victims_of(engine: Engine) -> VictimSelection:
    """Return the object that selects which of an engine's running requests are preempted."""
    return VictimSelection(engine.arrays, engine.cache, engine.running, engine.tenants)
