"""Converts snapshots of the statistics and live requests to protobuf messages for operators.

The snapshot names states, phases and reasons as the API's enums do, without the prefix; phases are
in lower case.
"""

import math
from collections.abc import Sequence
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from penstock.server.observe.operations.snapshot import (
    CacheSnapshot,
    FrontSnapshot,
    ModelSnapshot,
    Percentiles,
    PhaseChange,
    RequestView,
    Snapshot,
)
from penstock.server.rpc.mapping_out import duration_of, wait_reason_of
from penstock.v1 import model_pb2, output_pb2, state_pb2
from penstock.v1 import stats_pb2 as pb

_MAX_UINT32: Final = 2**32 - 1
_QUEUE, _PREFILL, _DECODE = "queue", "prefill", "decode"


def stats_of(snapshot: Snapshot, model: str | None = None) -> pb.ServerStats:
    """Return the message with the statistics of the service. If `model` is not None, its `models`
    field has only that model."""
    return pb.ServerStats(
        snapshot_time=timestamp_of(snapshot.time_s),
        uptime_duration=duration_of(snapshot.uptime_s),
        is_draining=snapshot.is_draining,
        models=[
            _model_stats_of(each, snapshot)
            for each in snapshot.models
            if model is None or each.model == model
        ],
        fronts=[_front_of(front) for front in snapshot.fronts],
    )


def live_request_of(view: RequestView) -> pb.LiveRequest:
    """Convert the view of one live request to its message."""
    return pb.LiveRequest(
        request_id=view.request_id,
        model=view.model,
        tenant=view.tenant,
        state=state_of(view.state),
        wait_reason=wait_reason_of(view.waits_for),
        queue_position=view.queue_position,
        priority=view.priority,
        arrival_time=timestamp_of(view.arrival_s),
        usage=output_pb2.TokenUsage(
            num_prompt_tokens=view.num_prompt_tokens,
            num_completion_tokens=view.num_output_tokens,
            num_cached_prompt_tokens=view.num_cached_tokens,
        ),
        timings=_timings_of(view),
        num_computed_tokens=view.num_computed_tokens,
        num_blocks=view.num_blocks,
        num_preemptions=view.num_preemptions,
        remaining_duration=duration_if_known(view.time_to_deadline_s),
        trace_id=view.trace_id,
        phase=_phase_of(view.phase),
        history=[
            pb.PhaseChange(phase=_phase_of(change.phase), start_time=timestamp_of(change.since_s))
            for change in view.history
        ],
        num_backlog_tokens=view.num_backlog_tokens,
    )


def state_of(name: str) -> state_pb2.RequestState.ValueType:
    """Return the RequestState with this name, "PENDING" or "PROCESSING"."""
    return state_pb2.RequestState.Value(f"REQUEST_STATE_{name}")


def timestamp_of(time_s: float) -> Timestamp:
    """Convert seconds since 1970 to a timestamp with microseconds."""
    timestamp = Timestamp()
    timestamp.FromMicroseconds(round(time_s * 1e6))
    return timestamp


def duration_if_known(duration_s: float | None) -> Duration | None:
    """Convert seconds to a protobuf Duration; return None if the value is None or not finite."""
    if duration_s is None or not math.isfinite(duration_s):
        return None
    return duration_of(duration_s)


def _model_stats_of(model: ModelSnapshot, snapshot: Snapshot) -> pb.ModelStats:
    return pb.ModelStats(
        model=model.model,
        state=_model_state_of(model, snapshot),
        num_pending=model.num_pending,
        num_processing=model.num_processing,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=min(model.max_num_batched_tokens, _MAX_UINT32),
        cache=cache_of(model.cache),
        totals=pb.ModelTotals(
            num_accepted=model.num_accepted,
            num_rejected=model.num_rejected,
            num_completed=model.num_completed,
            num_cancelled=model.num_cancelled,
            num_failed=model.num_failed,
            num_preemptions=model.num_preemptions,
            num_steps=model.num_steps,
            num_prompt_tokens=model.num_prompt_tokens,
            num_cached_prompt_tokens=model.num_cached_prompt_tokens,
            num_completion_tokens=model.num_completion_tokens,
        ),
        prefill_tokens_per_second=model.prefill_tokens_per_s,
        decode_tokens_per_second=model.decode_tokens_per_s,
        mean_step_duration=duration_if_known(model.mean_step_s),
        estimated_queue_duration=duration_if_known(model.estimated_queue_s),
        num_engine_restarts=model.num_engine_restarts,
        ttft=_percentiles_of(model.ttft),
        itl=_percentiles_of(model.itl),
        queue=_percentiles_of(model.queue),
        total=_percentiles_of(model.total),
        wait_reason=wait_reason_of(model.waits_for),
        engine_epoch=model.epoch,
    )


def _model_state_of(model: ModelSnapshot, snapshot: Snapshot) -> model_pb2.ModelState.ValueType:
    if snapshot.is_draining:
        return model_pb2.MODEL_STATE_DRAINING
    if model.is_up:
        return model_pb2.MODEL_STATE_READY
    return model_pb2.MODEL_STATE_RECOVERING if model.epoch else model_pb2.MODEL_STATE_LOADING


def cache_of(cache: CacheSnapshot) -> pb.CacheStats:
    """Return the message with the numbers of used, cached and free blocks of the KV cache."""
    return pb.CacheStats(
        block_size_tokens=cache.block_size_tokens,
        num_total_blocks=cache.num_total_blocks,
        num_used_blocks=cache.num_used_blocks,
        num_cached_blocks=cache.num_cached_blocks,
        num_free_blocks=cache.num_free_blocks,
    )


def _percentiles_of(percentiles: Percentiles) -> pb.DurationPercentiles:
    return pb.DurationPercentiles(
        p50=duration_if_known(percentiles.p50_s),
        p90=duration_if_known(percentiles.p90_s),
        p99=duration_if_known(percentiles.p99_s),
        num_values=percentiles.num,
    )


def _front_of(front: FrontSnapshot) -> pb.FrontStats:
    return pb.FrontStats(
        index=front.index,
        pid=front.pid,
        num_streams=front.num_streams,
        num_backlog_tokens=front.num_backlog_tokens,
        num_live_requests=front.num_live,
    )


def _phase_of(name: str) -> pb.RequestPhase.ValueType:
    if not name:
        return pb.REQUEST_PHASE_UNSPECIFIED
    return pb.RequestPhase.Value(f"REQUEST_PHASE_{name.upper()}")


def _timings_of(view: RequestView) -> output_pb2.RequestTimings:
    """Return the time in each phase so far, the time to first token, and the age of a request.
    Without a history, only the age is known."""
    now_s = view.arrival_s + view.age_s
    ends_s = [change.since_s for change in view.history[1:]]
    spent_s = dict.fromkeys((_QUEUE, _PREFILL, _DECODE), 0.0)
    for change, end_s in zip(view.history, [*ends_s, now_s], strict=False):
        if change.phase in spent_s:
            spent_s[change.phase] += max(0.0, end_s - change.since_s)
    return output_pb2.RequestTimings(
        queue_duration=duration_of(spent_s[_QUEUE]),
        prefill_duration=duration_of(spent_s[_PREFILL]),
        ttft_duration=duration_if_known(_ttft_s(view.arrival_s, view.history)),
        decode_duration=duration_of(spent_s[_DECODE]),
        total_duration=duration_of(view.age_s),
    )


def _ttft_s(arrival_s: float, history: Sequence[PhaseChange]) -> float | None:
    """Return the time in seconds from arrival to the first sampled token; None before that token.

    The first token is sampled when the decode phase starts.
    """
    for change in history:
        if change.phase == _DECODE:
            return max(0.0, change.since_s - arrival_s)
    return None
