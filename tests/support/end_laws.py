"""How a request may end, and what its client must have been reported by then.

Owns the cause of every end: no end without the one thing that can bring it about.
"""

from __future__ import annotations

import math

from penstock.executor.fault import FaultKind
from penstock.scheduler.events import Failed, Finished, Queued
from penstock.scheduler.request import NO_TIME, FailureReason, FinishReason
from support.game_records import Game, Told

AT_THE_DOOR = (
    FailureReason.PROMPT_TOO_LONG,
    FailureReason.EXCEEDS_KV_CACHE,
    FailureReason.TENANT_OVER_QUOTA,
    FailureReason.QUEUE_FULL,
)

FOR_LACK_OF_TIME = (
    FailureReason.TTFT_DEADLINE_EXCEEDED,
    FailureReason.DEADLINE_EXCEEDED,
    FailureReason.TTFT_DEADLINE_UNREACHABLE,
    FailureReason.DEADLINE_UNREACHABLE,
)


def check_queued(game: Game, told: Told, queued: Queued) -> None:
    """The queue's news: once, of the first output, and with numbers that can be true."""
    assert told.num_queued == 1
    assert told.spec.leader_key == 0
    assert told.num_admissions == 0
    assert 0 <= queued.num_ahead <= game.config.max_num_waiting
    assert is_duration(queued.estimated_queue_s)


def check_finish(game: Game, told: Told, end: Finished) -> None:
    """COMPLETED: cancelled as asked, out of time, or with the whole reference generation."""
    stop_ids = told.spec.stop_ids
    is_stopped = told.reference[-1] in stop_ids
    if told.cancelled_as is not None:
        assert end.reason is told.cancelled_as
    elif end.reason is FinishReason.TIME_LIMIT:
        assert game.clock() >= told.spec.time_limit_s
    else:
        assert len(told.tokens) == len(told.reference)
        assert end.reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        assert end.stop_id == (stop_ids[0] if is_stopped else -1)


def check_failure(game: Game, told: Told, end: Failed) -> None:
    """ERROR: for a reason that holds, with estimates that can be true."""
    spec, now, reason = told.spec, game.clock(), end.reason
    info = game.executor.info
    assert all(map(is_duration, (end.estimate_s, end.deadline_s)))
    # Never, for one that no machine of this kind serves in time.
    assert is_duration(end.retry_after_s) or (
        end.retry_after_s == math.inf and reason in FOR_LACK_OF_TIME
    )
    match reason:
        case FailureReason.PROMPT_TOO_LONG:
            assert spec.max_total_tokens > info.max_seq_len
        case FailureReason.EXCEEDS_KV_CACHE:
            assert -(-(spec.max_total_tokens - 1) // info.block_size) > info.num_blocks
        case FailureReason.DEADLINE_EXCEEDED:
            assert now >= spec.deadline_s
        case FailureReason.TTFT_DEADLINE_EXCEEDED:
            assert now >= spec.ttft_deadline_s
            assert not told.tokens
        case FailureReason.EXECUTOR_REQUEST_FAILED:
            assert any(fault.kind is FaultKind.REQUEST_FAILS for fault in game.simulated.faults)
        case FailureReason.TENANT_OVER_QUOTA:
            assert game.config.max_num_waiting_per_tenant is not None
        case FailureReason.TTFT_DEADLINE_UNREACHABLE:
            assert not told.tokens
            _check_unreachable(game, told, end, spec.ttft_deadline_s)
        case FailureReason.DEADLINE_UNREACHABLE:
            _check_unreachable(game, told, end, spec.deadline_s)
        case _:
            assert reason is FailureReason.QUEUE_FULL, f"{reason.name} was never caused"
    if reason in AT_THE_DOOR:
        assert told.num_admissions == 0
        # At a full queue a request that waits may give way to another.
        assert told.num_queued == 0 or reason is FailureReason.QUEUE_FULL


def _check_unreachable(game: Game, told: Told, end: Failed, deadline_s: float) -> None:
    """Refused or dropped for a deadline it has, that is still to come."""
    spec = told.spec
    assert game.config.deadline_admission
    assert deadline_s != NO_TIME
    assert end.at_s < deadline_s
    # What runs is given up for a small chance alone.
    assert end.chance is not None or not told.is_running
    assert end.chance is None or (game.config.min_deadline_chance > 0.0 and 0.0 <= end.chance < 1.0)
    assert end.estimate_s is not None
    assert end.deadline_s is not None
    assert end.retry_after_s is not None
    assert math.isclose(end.deadline_s, deadline_s - spec.arrival_s, abs_tol=1e-6)
    assert end.estimate_s >= end.deadline_s - 1e-6


def check_history(game: Game) -> None:
    """At the end of the game: every client ended, and no client ran who was not stated to wait
    first."""
    queued = {told.spec.request_id for told in game.history if told.num_queued}
    for told in game.history:
        assert told.end is not None
        assert not told.num_admissions or told.spec.request_id in queued


def is_duration(seconds: float | None) -> bool:
    """None, or a finite number of seconds that is not negative."""
    return seconds is None or (math.isfinite(seconds) and seconds >= 0.0)
