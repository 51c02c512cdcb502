"""Converts messages of OperationsService to values.

All responses of OperationsService are decoded here. A newer server may send unknown enum values;
they become UNKNOWN.
"""

from google.protobuf.timestamp_pb2 import Timestamp

import penstock.v1 as pb
from penstock.client.decoding import (
    decode_enum,
    decode_optional_s,
    decode_seconds,
    decode_state,
    decode_timings,
    decode_usage,
)
from penstock.client.events import WaitReason
from penstock.client.model_info import ModelState
from penstock.client.operations_values import (
    CacheStats,
    FrontStats,
    LiveRequest,
    ModelStats,
    ModelTotals,
    Percentiles,
    PhaseChange,
    RequestPhase,
    ServerStats,
    StepRecord,
    StepShare,
)


def decode_stats(message: pb.ServerStats) -> ServerStats:
    """Convert a snapshot of the server's statistics."""
    return ServerStats(
        time_s=_moment_s(message.snapshot_time),
        uptime_s=decode_seconds(message.uptime_duration),
        is_draining=message.is_draining,
        models=tuple(_model_stats(model) for model in message.models),
        fronts=tuple(
            FrontStats(
                index=front.index,
                pid=front.pid,
                num_streams=front.num_streams,
                num_live_requests=front.num_live_requests,
                num_backlog_tokens=front.num_backlog_tokens,
            )
            for front in message.fronts
        ),
    )


def decode_live_request(message: pb.LiveRequest) -> LiveRequest:
    """Convert one live request. An unset queue position or deadline becomes None."""
    has_position = message.HasField("queue_position")
    return LiveRequest(
        request_id=message.request_id,
        model=message.model,
        tenant=message.tenant,
        state=decode_state(message.state),
        phase=decode_enum(RequestPhase, message.phase),
        wait_reason=decode_enum(WaitReason, message.wait_reason),
        queue_position=message.queue_position if has_position else None,
        priority=message.priority,
        arrival_s=_moment_s(message.arrival_time),
        usage=decode_usage(message.usage),
        timings=decode_timings(message.timings),
        num_computed_tokens=message.num_computed_tokens,
        num_blocks=message.num_blocks,
        num_preemptions=message.num_preemptions,
        num_backlog_tokens=message.num_backlog_tokens,
        time_to_deadline_s=decode_optional_s(message, "remaining_duration"),
        trace_id=message.trace_id,
        history=tuple(
            PhaseChange(
                phase=decode_enum(RequestPhase, change.phase), since_s=_moment_s(change.start_time)
            )
            for change in message.history
        ),
    )


def decode_step(message: pb.StepRecord) -> StepRecord:
    """Convert one step of a flight record, the log of an engine's last steps."""
    return StepRecord(
        step=message.step,
        launch_s=_moment_s(message.launch_time),
        scheduler_s=decode_seconds(message.scheduler_duration),
        executor_s=decode_seconds(message.executor_duration),
        predicted_s=decode_optional_s(message, "predicted_duration"),
        inter_token_s=decode_optional_s(message, "inter_token_duration"),
        num_inter_token_outputs=message.num_inter_token_outputs,
        num_prefill_tokens=message.num_prefill_tokens,
        num_prefill_outputs=message.num_prefill_outputs,
        num_decode_outputs=message.num_decode_outputs,
        num_context_tokens=message.num_context_tokens,
        num_tokens=message.num_tokens,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_waiting_tokens=message.num_waiting_tokens,
        num_admitted=message.num_admitted,
        num_preempted=message.num_preempted,
        num_finished=message.num_finished,
        num_failed=message.num_failed,
        wait_reason=decode_enum(WaitReason, message.wait_reason),
        shares=tuple(
            StepShare(
                request_id=share.request_id,
                output_index=share.output_index,
                num_tokens=share.num_tokens,
            )
            for share in message.shares
        ),
        admitted_request_ids=tuple(message.admitted_request_ids),
        preempted_request_ids=tuple(message.preempted_request_ids),
        ended_request_ids=tuple(message.ended_request_ids),
        cache=_cache(message.cache),
    )


def _model_stats(message: pb.ModelStats) -> ModelStats:
    totals = message.totals
    return ModelStats(
        model=message.model,
        state=decode_enum(ModelState, message.state),
        num_pending=message.num_pending,
        num_processing=message.num_processing,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        cache=_cache(message.cache),
        totals=ModelTotals(
            num_accepted=totals.num_accepted,
            num_rejected=totals.num_rejected,
            num_completed=totals.num_completed,
            num_cancelled=totals.num_cancelled,
            num_failed=totals.num_failed,
            num_preemptions=totals.num_preemptions,
            num_steps=totals.num_steps,
            num_prompt_tokens=totals.num_prompt_tokens,
            num_cached_prompt_tokens=totals.num_cached_prompt_tokens,
            num_completion_tokens=totals.num_completion_tokens,
        ),
        prefill_tokens_per_s=message.prefill_tokens_per_second,
        decode_tokens_per_s=message.decode_tokens_per_second,
        mean_step_s=decode_optional_s(message, "mean_step_duration"),
        estimated_queue_s=decode_optional_s(message, "estimated_queue_duration"),
        num_engine_restarts=message.num_engine_restarts,
        engine_epoch=message.engine_epoch,
        ttft=_percentiles(message.ttft),
        itl=_percentiles(message.itl),
        queue=_percentiles(message.queue),
        total=_percentiles(message.total),
        wait_reason=decode_enum(WaitReason, message.wait_reason),
    )


def _cache(message: pb.CacheStats) -> CacheStats:
    return CacheStats(
        block_size_tokens=message.block_size_tokens,
        num_total_blocks=message.num_total_blocks,
        num_used_blocks=message.num_used_blocks,
        num_cached_blocks=message.num_cached_blocks,
        num_free_blocks=message.num_free_blocks,
    )


def _percentiles(message: pb.DurationPercentiles) -> Percentiles:
    return Percentiles(
        p50_s=decode_optional_s(message, "p50"),
        p90_s=decode_optional_s(message, "p90"),
        p99_s=decode_optional_s(message, "p99"),
        num_values=message.num_values,
    )


def _moment_s(moment: Timestamp) -> float:
    return moment.seconds + moment.nanos / 1e9
