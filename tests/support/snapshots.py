"""Statistics of a service and views of its live requests, as the observer makes them."""

import dataclasses
from typing import Any

from penstock.server.observe.operations.snapshot import (
    CacheSnapshot,
    FrontSnapshot,
    ModelSnapshot,
    Percentiles,
    PhaseChange,
    RequestView,
    Snapshot,
)

NOW_UNIX_S = 1_790_000_000.0

MODEL = ModelSnapshot(
    model="tiny",
    is_up=True,
    epoch=2,
    num_pending=3,
    num_processing=5,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    cache=CacheSnapshot(
        block_size_tokens=16,
        num_total_blocks=100,
        num_used_blocks=40,
        num_cached_blocks=35,
        num_free_blocks=25,
    ),
    num_accepted=20,
    num_rejected=2,
    num_completed=11,
    num_cancelled=1,
    num_failed=1,
    num_preemptions=4,
    num_steps=1000,
    num_prompt_tokens=5000,
    num_cached_prompt_tokens=1250,
    num_completion_tokens=7000,
    prefill_tokens_per_s=120.5,
    decode_tokens_per_s=900.0,
    mean_step_s=0.0125,
    estimated_queue_s=0.75,
    num_engine_restarts=1,
    ttft=Percentiles(p50_s=0.05, p90_s=0.1, p99_s=0.2, num=11),
    itl=Percentiles(p50_s=0.012, p90_s=0.014, p99_s=0.03, num=7000),
    queue=Percentiles(p50_s=0.001, p90_s=0.01, p99_s=0.1, num=11),
    waits_for="BLOCKS",
)

SNAPSHOT = Snapshot(
    time_s=NOW_UNIX_S,
    uptime_s=7384.5,
    is_draining=False,
    models=(MODEL,),
    fronts=(
        FrontSnapshot(index=1, pid=4001, num_streams=6, num_live=5, num_backlog_tokens=17),
        FrontSnapshot(index=2, pid=4002, num_streams=3, num_live=3, num_backlog_tokens=0),
    ),
)


def snapshot(time_s: float = NOW_UNIX_S, **changes: Any) -> Snapshot:
    """Return the statistics at Unix time `time_s`; `changes`: other fields of the ModelSnapshot."""
    models = (dataclasses.replace(MODEL, **changes),)
    return dataclasses.replace(SNAPSHOT, time_s=time_s, models=models)


def request_view(number: int = 1, **changes: Any) -> RequestView:
    """Return a request in its decode phase, which arrived 100 - `number` seconds ago."""
    arrival_s = NOW_UNIX_S - 100.0 + number
    view = RequestView(
        request_id=f"request-{number}",
        model="tiny",
        tenant="acme",
        state="PROCESSING",
        phase="decode",
        waits_for="",
        queue_position=None,
        priority=0,
        arrival_s=arrival_s,
        age_s=NOW_UNIX_S - arrival_s,
        num_prompt_tokens=96,
        num_cached_tokens=32,
        num_output_tokens=17,
        num_computed_tokens=112,
        num_blocks=8,
        num_preemptions=0,
        num_backlog_tokens=2,
        time_to_deadline_s=None,
        trace_id="0af7651916cd43dd8448eb211c80319c",
        history=(
            PhaseChange(phase="prepare", since_s=arrival_s),
            PhaseChange(phase="queue", since_s=arrival_s + 0.25),
            PhaseChange(phase="prefill", since_s=arrival_s + 1.25),
            PhaseChange(phase="decode", since_s=arrival_s + 1.75),
        ),
    )
    return dataclasses.replace(view, **changes)


def waiting_view(number: int, **changes: Any) -> RequestView:
    given: dict[str, Any] = {
        "state": "PENDING",
        "phase": "queue",
        "waits_for": "BLOCKS",
        "queue_position": 0,
        "num_output_tokens": 0,
        "num_computed_tokens": 0,
        "num_blocks": 0,
        **changes,
    }
    return request_view(number, **given)


def numbered(num_views: int) -> tuple[RequestView, ...]:
    """Return the views of `num_views` requests in order of arrival, one second apart."""
    return tuple(map(request_view, range(num_views)))
