"""The results of OperationsService calls, as immutable values.

Durations are in seconds, times in seconds since 1970-01-01 UTC; None means unknown.
"""

from dataclasses import dataclass

from penstock.client.contract_enum import ContractEnum
from penstock.client.events import RequestState, Timings, Usage, WaitReason
from penstock.client.model_info import ModelState


class RequestPhase(ContractEnum):
    """The phase of a live request.

    Attributes:
        UNKNOWN: A phase that is newer than this client.
        UNSPECIFIED: Not reported.
        PREPARE: Is being checked and tokenised.
        QUEUE: Waiting in the queue.
        PREFILL: Its prompt is being computed or recomputed.
        DECODE: Its output is being generated.
        DELIVER: The engine has finished it; its last messages are being sent.
    """

    UNKNOWN = -1
    UNSPECIFIED = 0
    PREPARE = 1
    QUEUE = 2
    PREFILL = 3
    DECODE = 4
    DELIVER = 5


class LogLevel(ContractEnum):
    """The lowest severity that a server logs: DEBUG, INFO, WARNING or ERROR."""

    DEBUG = 1
    INFO = 2
    WARNING = 3
    ERROR = 4


class ServerProcess(ContractEnum):
    """A kind of process of a server.

    Attributes:
        ENGINE: Runs the scheduler and the executor.
        FRONT: Serves clients; there may be several.
        OBSERVER: Exports traces and metrics, and serves the operations port.
    """

    ENGINE = 1
    FRONT = 2
    OBSERVER = 3


class FlightFormat(ContractEnum):
    """The file format of a flight record, the log of an engine's last steps.

    Attributes:
        PERFETTO: For ui.perfetto.dev.
        RAW: For `penstock timeline` and `penstock simulate`.
    """

    PERFETTO = 2
    RAW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles of a duration over the last minute, with a relative error of up to one percent;
    None if there are no values.

    Attributes:
        p50_s: Median.
        p90_s: 90th percentile.
        p99_s: 99th percentile.
        num_values: Number of values.
    """

    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    num_values: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """The KV cache in blocks; used + cached + free = total.

    Attributes:
        block_size_tokens: Tokens of one block.
        num_total_blocks: All blocks.
        num_used_blocks: Blocks held by running requests.
        num_cached_blocks: Blocks not in use, kept for reuse.
        num_free_blocks: Blocks not in use and empty.
    """

    block_size_tokens: int
    num_total_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTotals:
    """Numbers of requests, steps and tokens of one model since the server started.

    Attributes:
        num_accepted: Requests sent to the engine.
        num_rejected: Requests rejected as invalid or for lack of capacity.
        num_completed: Requests that ended without an error, including cancelled ones.
        num_cancelled: Requests that ended by cancellation.
        num_failed: Requests that ended with an error.
        num_preemptions: Preemptions.
        num_steps: Steps of the engine.
        num_prompt_tokens: Prompt tokens of requests that were admitted and have ended.
        num_cached_prompt_tokens: The part of `num_prompt_tokens` that was found in the KV cache.
        num_completion_tokens: Tokens generated.
    """

    num_accepted: int
    num_rejected: int
    num_completed: int
    num_cancelled: int
    num_failed: int
    num_preemptions: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStats:
    """Load, speed and latency of one model.

    Attributes:
        model: The model's name.
        state: Its state.
        num_pending: Outputs in the queue; a request with n outputs counts n times.
        num_processing: Outputs in the running batch.
        max_num_seqs: Maximum number of outputs in the running batch.
        max_num_batched_tokens: Maximum number of tokens of one step.
        cache: The KV cache.
        totals: Counts since the server started.
        prefill_tokens_per_s: Prompt tokens computed per second, over the last ten seconds.
        decode_tokens_per_s: Tokens generated per second, over the last ten seconds.
        mean_step_s: Mean duration of a step, over the last ten seconds.
        estimated_queue_s: Estimated wait of a request that arrives now with default priority.
        num_engine_restarts: Restarts of the engine since the server started.
        engine_epoch: 1 for the first engine, incremented at each restart.
        ttft: Time to first token, of requests that ended in the last minute.
        itl: Inter-token latency of all tokens of the last minute.
        queue: Time in the queue, of requests that ended in the last minute.
        total: Time from arrival to the end, of requests that ended in the last minute.
        wait_reason: What the first request of the queue waits for.
    """

    model: str
    state: ModelState
    num_pending: int
    num_processing: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cache: CacheStats
    totals: ModelTotals
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    mean_step_s: float | None
    estimated_queue_s: float | None
    num_engine_restarts: int
    engine_epoch: int
    ttft: Percentiles
    itl: Percentiles
    queue: Percentiles
    total: Percentiles
    wait_reason: WaitReason


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontStats:
    """One front process, which serves clients.

    Attributes:
        index: Its number, from 1; a process that replaces another has a new one.
        pid: Its process id.
        num_streams: Open calls of clients.
        num_live_requests: Requests that have not ended, or whose end their client has not read.
        num_backlog_tokens: Output tokens that clients have not read.
    """

    index: int
    pid: int
    num_streams: int
    num_live_requests: int
    num_backlog_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStats:
    """A snapshot of a server.

    Attributes:
        time_s: Time of the snapshot.
        uptime_s: How long the server has been running.
        is_draining: Whether it rejects new requests because it is about to stop.
        models: One for each model.
        fronts: One for each front process.
    """

    time_s: float
    uptime_s: float
    is_draining: bool
    models: tuple[ModelStats, ...]
    fronts: tuple[FrontStats, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange:
    """The entry of a live request into a phase.

    Attributes:
        phase: The phase.
        since_s: When the request entered it.
    """

    phase: RequestPhase
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """One request that has not ended, without its content.

    Attributes:
        request_id: Its id.
        model: Name of its model.
        tenant: The tenant that submitted it.
        state: PENDING or PROCESSING.
        phase: Its current phase.
        wait_reason: What it waits for, while PENDING.
        queue_position: Requests before it in the queue; None if unknown or not PENDING.
        priority: -100 to 100; higher is more urgent.
        arrival_s: When it arrived.
        usage: Its tokens so far.
        timings: Its time in each phase; `total_s` is its age.
        num_computed_tokens: Tokens in the KV cache.
        num_blocks: Blocks of the KV cache that its outputs hold; shared blocks are counted for each
            output.
        num_preemptions: How often it was preempted.
        num_backlog_tokens: Output tokens that its client has not read.
        time_to_deadline_s: Time left until its earliest deadline; None without a deadline.
        trace_id: 32 hexadecimal digits; "" if it is not traced.
        history: The phases that it has entered, oldest first; empty if its front process has ended
            or does not respond.
    """

    request_id: str
    model: str
    tenant: str
    state: RequestState
    phase: RequestPhase
    wait_reason: WaitReason
    queue_position: int | None
    priority: int
    arrival_s: float
    usage: Usage
    timings: Timings
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    num_backlog_tokens: int
    time_to_deadline_s: float | None
    trace_id: str
    history: tuple[PhaseChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """The number of prompt tokens that a step computed for one output.

    Attributes:
        request_id: The id of its request; "" if the flight recorder no longer has it.
        output_index: Which of the request's outputs, from 0.
        num_tokens: Prompt tokens computed.
    """

    request_id: str
    output_index: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of an engine, from its flight recorder.

    Attributes:
        step: Its number since the engine started.
        launch_s: When it was launched.
        scheduler_s: Time to plan the step and process its result.
        executor_s: From launch to result.
        predicted_s: Predicted `executor_s`; None: no prediction.
        inter_token_s: Mean time since the previous token of the outputs that got another token;
            None if there were none.
        num_inter_token_outputs: Number of outputs in the mean `inter_token_s`.
        num_prefill_tokens: Prompt tokens computed.
        num_prefill_outputs: Outputs for which prompt tokens were computed.
        num_decode_outputs: Outputs in the decode phase.
        num_context_tokens: Sum of the context lengths of all outputs in the step, in tokens.
        num_tokens: Tokens generated.
        num_running: Outputs in the running batch.
        num_waiting: Outputs in the queue.
        num_waiting_tokens: Tokens of the outputs in the queue: their prompts, and what they
            generated before a preemption.
        num_admitted: Outputs admitted.
        num_preempted: Outputs preempted.
        num_finished: Outputs that ended without an error.
        num_failed: Outputs that failed.
        wait_reason: What the first request of the queue waits for.
        shares: Prompt tokens by output.
        admitted_request_ids: Ids of admitted requests, as far as the recorder still has them; the
            counts above include all.
        preempted_request_ids: The same for preempted requests.
        ended_request_ids: The same for requests that have ended.
        cache: The KV cache after the step.
    """

    step: int
    launch_s: float
    scheduler_s: float
    executor_s: float
    predicted_s: float | None
    inter_token_s: float | None
    num_inter_token_outputs: int
    num_prefill_tokens: int
    num_prefill_outputs: int
    num_decode_outputs: int
    num_context_tokens: int
    num_tokens: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_admitted: int
    num_preempted: int
    num_finished: int
    num_failed: int
    wait_reason: WaitReason
    shares: tuple[StepShare, ...]
    admitted_request_ids: tuple[str, ...]
    preempted_request_ids: tuple[str, ...]
    ended_request_ids: tuple[str, ...]
    cache: CacheStats
