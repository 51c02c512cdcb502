"""Thousands of requests with random cancels, failures and deadlines leave no resources in use.

PENSTOCK_NUM_REQUESTS sets the number of requests: 2,000 by default, 10,000 in `make nightly`.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.executor.trtllm.config import CapacityPolicy
from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.request import (
    NO_TIME,
    FailureReason,
    FinishReason,
    RequestSpec,
    SamplingParams,
)
from support.core import make_spec
from support.timeout import TEST_TIMEOUT_S
from support.trtllm_engine import TrtllmHarness, reference

NUM_REQUESTS = int(os.environ.get("PENSTOCK_NUM_REQUESTS", "2000"))
MAX_WAITING = 60
POISON = 3
"""A token at which the engine fails only its request."""


class Storm:
    """Sends random requests, all drawn with one seed, to an engine whose stand-in is not paused."""

    def __init__(self, folder: Path, policy: CapacityPolicy, seed: int) -> None:
        self.random = random.Random(seed)
        self.harness = TrtllmHarness(
            folder,
            is_free=True,
            max_batch_size=16,
            num_blocks=40,
            policy=policy,
            fake={"fail_tokens": [POISON]},
            watch={"abort_timeout_s": 0.2, "response_timeout_s": 1e9},
        )
        self.specs: dict[int, RequestSpec] = {}
        self.num_preempted = 0
        self.live: list[int] = []

    def spec(self, key: int) -> RequestSpec:
        choose = self.random
        stem = choose.choice(([10, 11, 12, 13], [20, 21, 22, 23, 24, 25, 26, 27], []))
        prompt = [*stem, *(choose.randrange(100, 4000) for _ in range(choose.randint(1, 9)))]
        if choose.random() < 0.03:
            prompt[-1] = POISON
        now_s = self.harness.clock.now_s
        return make_spec(
            key,
            prompt,
            max_tokens=choose.randint(1, 14),
            priority=choose.randint(-3, 3),
            hashed=choose.random() < 0.7,
            deadline_s=self.deadline_s(key),
            ttft_deadline_s=now_s + choose.uniform(0.1, 0.5) if choose.random() < 0.1 else NO_TIME,
            stop_ids=(5, 6, 7) if choose.random() < 0.5 else (),
            sampling=SamplingParams(temperature=0.0 if choose.random() < 0.8 else 1.0),
        )

    def deadline_s(self, key: int) -> float:
        """Return the deadline of request `key`. Every hundredth request has the current time; of
        the others, one in ten has a time within the next second, and the rest have none (NO_TIME).
        """
        now_s = self.harness.clock.now_s
        if key % 100 == 0:
            return now_s
        choose = self.random
        return now_s + choose.uniform(0.0, 1.0) if choose.random() < 0.1 else NO_TIME

    def arrive(self) -> None:
        for _ in range(self.random.randint(0, 12)):
            waiting = len(self.harness.engine.queue)
            if len(self.specs) < NUM_REQUESTS and waiting < MAX_WAITING:
                key = len(self.specs) + 1
                self.specs[key] = self.spec(key)
                self.live.append(key)
                self.harness.submit(self.specs[key])

    def cancel(self) -> None:
        for _ in range(self.random.randint(0, 3)):
            if self.live:
                reason = self.random.choice((FinishReason.CANCELLED, FinishReason.STOP))
                self.harness.engine.cancel(self.random.choice(self.live), reason)

    def step(self) -> None:
        harness = self.harness
        harness.clock.now_s += 0.02 * self.random.random()
        events = harness.engine.step()
        for key, token in zip(events.keys.tolist(), events.tokens.tolist(), strict=True):
            harness.outcomes[key].tokens.append(token)
        for end in events.ends:
            assert harness.outcomes[end.key].end is None
            harness.outcomes[end.key].end = end
            self.live.remove(end.key)
        self.num_preempted += sum(type(change).__name__ == "Preempted" for change in events.changes)

    def run(self) -> None:
        harness = self.harness
        for turn in range(200_000):
            is_over = len(self.specs) == NUM_REQUESTS
            if is_over and not harness.engine.has_work and not harness.num_in_engine:
                return
            self.arrive()
            if self.random.random() < 0.5:
                self.cancel()
            self.step()
            if turn % 50 == 0:
                harness.engine.check_integrity()
            # Sometimes run a step although the engine has not asked for it.
            if harness.num_in_engine and self.random.random() < 0.9:
                assert harness.is_ready(TEST_TIMEOUT_S)
        raise AssertionError("still busy")

    def check_outcomes(self) -> None:
        """Check the tokens of greedy requests against the reference, that each failure has an
        expected reason, and that an output that ended by length has all its tokens.
        """
        for key, spec in self.specs.items():
            outcome = self.harness.outcomes[key]
            if spec.sampling.temperature == 0.0:
                prompt = spec.prompt_ids.tolist()
                assert outcome.tokens == reference(self.harness, prompt, len(outcome.tokens))
            if isinstance(outcome.end, Failed):
                assert outcome.end.reason in {
                    FailureReason.EXECUTOR_REQUEST_FAILED,
                    FailureReason.DEADLINE_EXCEEDED,
                    FailureReason.TTFT_DEADLINE_EXCEEDED,
                }
                # After a preemption, generated tokens are part of the prompt.
                is_poisoned = POISON in [*spec.prompt_ids.tolist(), *outcome.tokens]
                is_failed = outcome.end.reason is FailureReason.EXECUTOR_REQUEST_FAILED
                assert is_poisoned or not is_failed
            else:
                assert isinstance(outcome.end, Completed)
                if outcome.end.reason is FinishReason.LENGTH:
                    assert len(outcome.tokens) == spec.max_tokens


class OpenResources:
    """The open files and threads of this process, to find which were added between two times."""

    def __init__(self) -> None:
        for thread in threading.enumerate():
            # These threads have finished their work, but may not have ended yet.
            if thread.name in ("trtllm build", "trtllm shutdown"):
                thread.join(TEST_TIMEOUT_S)
        self._threads = set(threading.enumerate())
        self._files = set(_open_files())

    def added_since(self, before: OpenResources) -> list[str]:
        threads = [thread.name for thread in self._threads - before._threads]
        return threads + [f"{fd}: {target}" for fd, target in self._files - before._files]


def _open_files() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc/self/fd").iterdir():
        # The folder's own descriptor is closed before it is read.
        with contextlib.suppress(FileNotFoundError):
            yield int(entry.name), str(entry.readlink())


@pytest.mark.parametrize("policy", list(CapacityPolicy))
def test_thousands_of_requests_leave_no_resources_in_use(
    tmp_path: Path, fake_trtllm: None, policy: CapacityPolicy, record_property: Any
) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", "1"))
    print(f"PENSTOCK_CHAOS_SEED={seed}")
    record_property("seed", seed)
    before = OpenResources()
    storm = Storm(tmp_path, policy, seed)
    harness = storm.harness
    try:
        during = OpenResources()
        storm.run()
        storm.check_outcomes()
        ends = [harness.outcomes[key].end for key in storm.specs]
        kinds = {end.reason for end in ends if end is not None}
        assert len([end for end in ends if end is not None]) == NUM_REQUESTS
        assert kinds >= {
            FinishReason.LENGTH,
            FinishReason.CANCELLED,
            FailureReason.EXECUTOR_REQUEST_FAILED,
            FailureReason.DEADLINE_EXCEEDED,
        }
        # Whether enough requests run at once to cause preemptions depends on the machine.
        if policy is not CapacityPolicy.MAX_UTILIZATION:
            assert storm.num_preempted == 0
        harness.control.pause()
        harness.iterate()
        harness.check_clean(num_lost=harness.executor.num_unconfirmed_aborts)
        assert len(harness.control.aborted) == len(set(harness.control.aborted))
        if policy is CapacityPolicy.GUARANTEED_NO_EVICT:  # with the other it may pause by itself
            assert harness.executor.audit.num_checks > 0
            assert harness.executor.audit.num_drifts == 0
        assert harness.executor.num_unconfirmed_aborts < len(harness.control.aborted)
        assert OpenResources().added_since(during) == []
    finally:
        harness.close()
    assert OpenResources().added_since(before) == []
