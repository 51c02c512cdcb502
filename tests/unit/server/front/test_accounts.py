"""The account of a request makes one record, with the engine's final report if that arrives in
time.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.scheduler.events import Admitted, Completed, Residency, StepEvents, Wait
from penstock.scheduler.request import FinishReason
from penstock.server.front.accounts import (
    MAX_WAIT_S,
    MAX_WAITING,
    Accounts,
    Outcome,
    RequestAccount,
)
from penstock.server.front.event_router import EventRouter, FrontCounters
from penstock.server.front.generation import GenerationSpec, TextInput
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.request_table import RequestTable
from penstock.server.front.watched_write import STALL_S, WatchedWrite
from support.record_log import RecordLog

CANCELLED = Outcome(1)
WAIT = Wait(blocks_s=2.0)


class Submission:
    """The attributes of a submission that a record reads."""

    def __init__(self, key: int) -> None:
        self.specs = (self,)
        self.key = key
        self.num_prompt_tokens = 5


class AccountsHarness:
    def __init__(self, **options: Any) -> None:
        self.log = RecordLog()
        settings: dict[str, Any] = {"is_tracing": True, "front_id": 3, "has_content": False}
        self.accounts = Accounts(self.log.recorder, **(settings | options))

    def live(self, key: int) -> RequestAccount:
        """Open and return the account of a request that was submitted to the engine."""
        account = self.accounts.open("Generate", arrival_s=0.0)
        generation = GenerationSpec(prompt=TextInput(text="canary"), prompt_path="text_prompt.text")
        account.request = LiveRequest(f"r-{key}", generation, 0.0)
        account.request.phases.note_submitted(1.0)
        account.request._submission = Submission(key)  # type: ignore[assignment]  # pyright: ignore[reportPrivateUsage]
        return account

    def close(self, account: RequestAccount, now_s: float = 5.0, *, is_up: bool = True) -> None:
        self.accounts.close(account, CANCELLED, now_s, is_engine_up=is_up)


def ended(key: int) -> Completed:
    return Completed(key=key, at_s=5.0, reason=FinishReason.CANCELLED, wait=WAIT)


async def test_a_record_waits_for_the_final_event() -> None:
    site = AccountsHarness()
    site.close(site.live(7))
    assert site.log.records == []
    site.accounts.on_late_event(ended(8))
    site.accounts.on_late_event(ended(7))
    site.accounts.on_late_event(ended(7))
    (record,) = site.log.records
    assert record.segments[-1].wait == WAIT
    assert (record.end_s, record.front_id, record.code) == (5.0, 3, 1)


async def test_a_wait_that_ended_before_the_cancel_arrived_is_explained() -> None:
    site = AccountsHarness()
    site.close(site.live(7))
    for key in (8, 7):
        admitted = Admitted(key=key, at_s=5.0, num_cached_tokens=0, num_preemptions=0, wait=WAIT)
        site.accounts.on_late_event(admitted)
    assert site.log.records == []
    residency = Residency(num_steps=1)
    site.accounts.on_late_event(
        Completed(key=7, at_s=5.1, reason=FinishReason.CANCELLED, residency=residency)
    )
    (record,) = site.log.records
    assert record.segments[-1].wait == WAIT


async def test_a_record_does_not_wait_for_long() -> None:
    site = AccountsHarness()
    for key in (1, 2):
        site.close(site.live(key), 5.0 + key)
    site.accounts.sweep(6.0 + MAX_WAIT_S)
    assert site.log.records == []
    site.accounts.sweep(6.5 + MAX_WAIT_S)
    assert [record.request_id for record in site.log.records] == ["r-1"]
    site.accounts.flush()
    site.accounts.flush()
    assert [record.request_id for record in site.log.records] == ["r-1", "r-2"]


async def test_a_record_does_not_wait_for_a_caller_that_has_gone() -> None:
    site = AccountsHarness()
    site.close(site.live(1), is_up=False)
    received = site.live(2)
    assert received.request is not None
    received.request.has_engine_end = True
    site.close(received)
    site.close(site.accounts.open("Generate", arrival_s=0.0))
    assert len(site.log.records) == 3


async def test_the_number_of_waiting_records_is_bounded() -> None:
    site = AccountsHarness()
    for key in range(1, MAX_WAITING + 3):
        site.close(site.live(key))
    assert [record.request_id for record in site.log.records] == ["r-1", "r-2"]


async def test_only_the_first_close_of_an_account_counts() -> None:
    site = AccountsHarness()
    account = site.accounts.open("Generate", arrival_s=0.0)
    site.close(account)
    site.accounts.close(account, Outcome(0), 9.0, is_engine_up=True)
    assert [(record.code, record.end_s) for record in site.log.records] == [(1, 5.0)]


async def test_a_bug_in_a_record_is_counted_and_affects_no_caller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("can" + "ary")

    site = AccountsHarness()
    monkeypatch.setattr(RequestAccount, "record", broken)
    site.close(site.accounts.open("Generate", arrival_s=0.0))
    assert site.log.recorder.num_unreadable == 1
    assert site.log.recorder.num_records == 1
    assert "canary" not in caplog.text
    assert "ValueError" in caplog.text


async def test_stalls_of_a_shared_writer_count_from_when_it_is_shared() -> None:
    writer = WatchedWrite()
    writer.blocked_since_s = 0.0
    writer.end_write(10.0)
    site = AccountsHarness()
    account = site.accounts.open("Multiplex", arrival_s=11.0)
    account.share(writer)
    writer.blocked_since_s = 12.0
    writer.end_write(13.0)
    site.close(account, 14.0)
    (record,) = site.log.records
    assert record.num_stalls == 1
    assert abs(record.stalled_s - (1.0 - STALL_S)) < 1e-9


async def test_nothing_is_kept_without_a_journal() -> None:
    accounts = Accounts(None, is_tracing=False, front_id=1, has_content=True)
    account = accounts.open("Generate", arrival_s=0.0)
    accounts.close(account, CANCELLED, 1.0, is_engine_up=True)
    assert not accounts.is_enabled
    assert not accounts.has_content
    assert account.outcome is None


def test_the_router_passes_on_late_admissions() -> None:
    late: list[object] = []
    router = EventRouter(
        RequestTable(front_id=1, max_live_requests=1),
        FrontCounters(),
        max_backlog_tokens=1,
        cancel=lambda *_: None,
        on_late_event=late.append,
    )
    admitted = Admitted(key=7, at_s=5.0, num_cached_tokens=0, num_preemptions=0, wait=WAIT)
    router.dispatch(StepEvents(step=1, at_s=5.0, changes=(admitted,)), 5.0)
    assert late == [admitted]
