"""Builders for tests of the scheduler: specs, a clock, an executor with immediate results."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from penstock.scheduler.batch import Batch, StepResult
from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Failed, Finished, StepEvents
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.quotas import QuotaAccounts
from penstock.scheduler.request import NO_TIME, RequestSpec, SamplingParams
from penstock.scheduler.sessions import SessionKey, Sessions
from penstock.scheduler.tenants import Tenants
from penstock.scheduler.victims import VictimSelection

BLOCK_SIZE = 4
SALT = b"test"


def blocks_of(sessions: Sessions, key: SessionKey) -> tuple[int, ...]:
    """Return the blocks that a session holds, in order; empty if there is no session."""
    session = sessions._sessions.get(key)
    return () if session is None else tuple(session.blocks)


def num_live_of(accounts: QuotaAccounts, tenant: str) -> int:
    """Return how many requests of a tenant were admitted and have not ended."""
    row = accounts._row_of.get(tenant)
    return 0 if row is None else accounts._num_live[row]


def service_of(tenants: Tenants, name: str) -> float:
    """Return the weighted service of a tenant since the last rebase, 0 for an unknown tenant."""
    index = tenants._index_of.get(name)
    return 0.0 if index is None else float(tenants.service[index])


class FakeClock:
    """A clock in seconds that the test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class NullExecutor:
    """Answers every sampled slot with `token(slot, position)`.

    Records the batches that run something; checks that every slot it received was returned.
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
        ends = dict(
            zip(batch.slots.tolist(), (batch.starts + batch.num_tokens).tolist(), strict=True)
        )
        tokens = [self._token(slot, ends[slot]) for slot in batch.sampled_slots.tolist()]
        self.results.append(
            StepResult(slots=batch.sampled_slots, tokens=np.array(tokens, dtype=np.int32))
        )

    def collect(self) -> StepResult:
        return self.results.popleft()

    def close(self) -> None:
        self.is_closed = True


def make_info(
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    max_seq_len: int = 64,
    pipeline_depth: int = 1,
    block_size: int = BLOCK_SIZE,
) -> ExecutorInfo:
    return ExecutorInfo(
        name="null",
        vocab_size=1000,
        block_size=block_size,
        num_blocks=num_blocks,
        max_seq_len=max_seq_len,
        max_num_seqs=max_num_seqs,
        pipeline_depth=pipeline_depth,
    )


def make_spec(
    key: int,
    prompt: int | Sequence[int] = 5,
    *,
    max_tokens: int = 4,
    hashed: bool = True,
    block_size: int = BLOCK_SIZE,
    request_id: str | None = None,
    min_tokens: int = 0,
    num_replayed: int = 0,
    stop_ids: tuple[int, ...] = (),
    leader_key: int = 0,
    output_index: int = 0,
    priority: int = 0,
    ttft_deadline_s: float = NO_TIME,
    deadline_s: float = NO_TIME,
    time_limit_s: float = NO_TIME,
    arrival_s: float = 0.0,
    tenant: str = "",
    sampling: SamplingParams | None = None,
) -> RequestSpec:
    """Return a spec; an int prompt is that many tokens, which no other key's prompt contains."""
    ids = list(range(key * 100, key * 100 + prompt)) if isinstance(prompt, int) else list(prompt)
    prompt_ids = np.array(ids, dtype=np.int32)
    return RequestSpec(
        key=key,
        request_id=request_id or f"request-{key}",
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        num_replayed=num_replayed,
        stop_ids=stop_ids,
        hash_salt=SALT if hashed else b"",
        block_hashes=hash_blocks(prompt_ids, block_size, chain_root(SALT)) if hashed else (),
        leader_key=leader_key,
        output_index=output_index,
        priority=priority,
        ttft_deadline_s=ttft_deadline_s,
        deadline_s=deadline_s,
        time_limit_s=time_limit_s,
        arrival_s=arrival_s,
        tenant=tenant,
        sampling=sampling or SamplingParams(),
    )


def make_engine(
    info: ExecutorInfo | None = None,
    config: SchedulerConfig | None = None,
    clock: Callable[[], float] | None = None,
    token: Callable[[int, int], int] = lambda _slot, _position: 7,
) -> tuple[Engine, NullExecutor]:
    """Return an engine over a NullExecutor; small and at time zero by default."""
    executor = NullExecutor(info or make_info(), token)
    config = config or SchedulerConfig(max_num_batched_tokens=16)
    return Engine(executor, config, clock or FakeClock()), executor


def run_until_idle(engine: Engine, max_steps: int = 10_000) -> list[StepEvents]:
    """Step until no work is left, checking every invariant after every step."""
    told: list[StepEvents] = []
    for _ in range(max_steps):
        if not engine.has_work:
            return told
        told.append(engine.step())
        engine.check_integrity()
    raise AssertionError(f"still busy after {max_steps} steps")


def outputs(told: Sequence[StepEvents]) -> dict[int, list[int]]:
    """Return tokens by key, in the order they were reported."""
    tokens: dict[int, list[int]] = {}
    for events in told:
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            tokens.setdefault(key, []).append(token)
    return tokens


def ends(told: Sequence[StepEvents]) -> dict[int, Finished | Failed]:
    """Return how each key ended; raise if one ended twice."""
    found: dict[int, Finished | Failed] = {}
    for events in told:
        for end in events.ends:
            assert end.key not in found, f"{end.key} ended twice"
            found[end.key] = end
    return found


def victims_of(engine: Engine) -> VictimSelection:
    """Return the victim selection over an engine's requests."""
    return VictimSelection(engine.arrays, engine.cache, engine.running, engine.tenants)
