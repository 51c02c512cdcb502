"""The ended requests that a front keeps for the next engine, within limits."""

from __future__ import annotations

import numpy as np

from penstock.scheduler.events import StepEvents
from penstock.server.front.kept_requests import KeptResults
from penstock.server.ipc.frames import KeptRequest, ResumeSpec
from penstock.server.ipc.step_frames import StepFrame

MAX_BYTES = 100_000


def result(
    name: str, num_tokens: int = 100, key: int = 1, message: bytes = b"m", tenant: str = ""
) -> KeptRequest:
    updates = StepEvents(
        step=0,
        at_s=1.0,
        keys=np.full(num_tokens, key, dtype=np.int64),
        tokens=np.arange(num_tokens, dtype=np.int32),
    )
    resume_spec = ResumeSpec(
        request_id=name, seed=1, arrival_s=0, deadline_s=9, resume_timeout_s=9, message=message
    )
    return KeptRequest(
        name=name,
        resume_spec=resume_spec,
        keys=(key,),
        tenant=tenant,
        history=StepFrame.from_events(updates),
    )


def test_the_oldest_go_where_there_are_too_many_bytes() -> None:
    results = KeptResults(MAX_BYTES)
    for number in range(300):
        results.add(result(str(number)))
        assert results.num_bytes <= MAX_BYTES
    names = [kept.name for kept in results]
    assert names == [str(number) for number in range(300 - len(names), 300)]
    assert len(names) > 30
    results.add(result("large", message=bytes(MAX_BYTES)))
    assert (len(results), results.num_bytes) == (0, 0)


def test_a_request_of_the_tenant_with_most_bytes_is_dropped() -> None:
    results = KeptResults(MAX_BYTES)
    results.add(result("small", tenant="small"))
    for number in range(300):
        results.add(result(str(number), tenant="large"))
    names = [kept.name for kept in results]
    assert names == ["small", *(str(number) for number in range(301 - len(names), 300))]


def test_one_is_counted_once_and_forgotten_by_its_keys() -> None:
    results = KeptResults(MAX_BYTES)
    results.add(result("a", 50))
    num_bytes = results.num_bytes
    results.add(result("a", 2000))
    results.add(result("a", 50, key=2))
    assert (len(results), results.num_bytes) == (1, num_bytes)
    results.forget("a", (1,))
    assert len(results) == 1, "another has its name by now"
    results.forget("a", (2,))
    assert (len(results), results.num_bytes) == (0, 0)
