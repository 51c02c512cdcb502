"""Every metric of a service: its name, its kind, what it says, its labels and buckets.

Owns the list, which `docs/metrics.md`, the dashboard and the alert rules are checked against. Does
not know where the values come from. Names carry their unit and are what `promtool` accepts; all of
them have the label `model` beside those named here. Small models on fast devices make a token in
under a millisecond, large ones on CPUs take seconds: the bounds of buckets span both, two or three
to the doubling where an alert would look.
"""

import enum
from dataclasses import dataclass
from typing import Final

_TOKEN_SECONDS_ENDS: Final = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04,
    0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Between two tokens, and for a step of the engine."""
_FIRST_TOKEN_SECONDS_ENDS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
"""Until the first token, and for the phases before it."""
_REQUEST_SECONDS_ENDS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96,
    81.92, 163.84, 327.68, 655.36, 1310.72, 2621.44,
)  # fmt: skip
"""A whole request; the doublings are those of the OpenTelemetry conventions."""
_OVERHEAD_SECONDS_ENDS: Final = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 1.0,
)  # fmt: skip
"""What should be next to nothing: the scheduler's share of a step, an event loop's lag."""
_TOKENS_ENDS: Final = (
    1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072,
    262144, 1048576,
)  # fmt: skip
_REQUESTS_ENDS: Final = (
    1,
    2,
    4,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    2048,
)
"""Requests of one step."""
_MESSAGES_ENDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)


class MetricKind(enum.Enum):
    """How a metric moves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `buckets`: the upper bounds of a histogram, rising, without infinity."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_all: list[MetricSpec] = []


def _counter(name: str, text: str, *labels: str) -> MetricSpec:
    _all.append(MetricSpec(f"penstock_{name}", MetricKind.COUNTER, text, labels))
    return _all[-1]


def _gauge(name: str, text: str, *labels: str) -> MetricSpec:
    _all.append(MetricSpec(f"penstock_{name}", MetricKind.GAUGE, text, labels))
    return _all[-1]


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> MetricSpec:
    _all.append(MetricSpec(f"penstock_{name}", MetricKind.HISTOGRAM, text, labels, buckets))
    return _all[-1]


# Requests. The counters come from the fronts as totals: nothing that is dropped is missing here.
REQUESTS: Final = _counter(
    "requests_total", "Requests that ended.", "method", "code", "reason", "finish_reason"
)
REQUEST_ERRORS: Final = _counter(
    "request_errors_total", "Requests that ended with an error, by the reason told.", "reason"
)
ADMISSION_REJECTED: Final = _counter(
    "admission_rejected_total", "Requests turned away for the state of the service.", "reason"
)
SUBMITTED: Final = _counter("requests_submitted_total", "Requests handed to the engine.")
REQUEST_SECONDS: Final = _histogram(
    "request_duration_seconds", "From arrival to the end.", _REQUEST_SECONDS_ENDS, "outcome"
)
TTFT: Final = _histogram(
    "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_SECONDS_ENDS
)
ITL: Final = _histogram(
    "inter_token_latency_seconds",
    "Between one token of a request and its next, as the engine made them.",
    _TOKEN_SECONDS_ENDS,
)
TPOT: Final = _histogram(
    "time_per_output_token_seconds",
    "Mean per request and output, after the first token.",
    _TOKEN_SECONDS_ENDS,
)
PREPARE_SECONDS: Final = _histogram(
    "request_prepare_seconds", "Parsed, checked, tokenised.", _FIRST_TOKEN_SECONDS_ENDS
)
QUEUE_SECONDS: Final = _histogram(
    "request_queue_seconds",
    "In the queue, over all stays of a request that was queued.",
    _FIRST_TOKEN_SECONDS_ENDS,
)
PREFILL_SECONDS: Final = _histogram(
    "request_prefill_seconds", "Computing the prompt.", _FIRST_TOKEN_SECONDS_ENDS
)
DECODE_SECONDS: Final = _histogram(
    "request_decode_seconds", "Generating, after the first token.", _REQUEST_SECONDS_ENDS
)
DELIVER_SECONDS: Final = _histogram(
    "request_deliver_seconds", "From the engine's end to the last message.", _REQUEST_SECONDS_ENDS
)
QUEUE_WAIT: Final = _counter(
    "queue_wait_seconds_total", "Time in the queue, by what the next in line lacked.", "reason"
)
PROMPT_TOKENS_EACH: Final = _histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS_ENDS)
GENERATION_TOKENS_EACH: Final = _histogram(
    "request_generation_tokens", "Tokens generated for a request.", _TOKENS_ENDS
)
MESSAGES_EACH: Final = _histogram(
    "request_messages", "Messages sent for a request.", _MESSAGES_ENDS
)
PROMPT_TOKENS: Final = _counter(
    "prompt_tokens_total", "Tokens of the prompts of requests that were let in and ended."
)
PREFIX_QUERIES: Final = _counter(
    "prefix_cache_queries_tokens_total", "Prompt tokens looked up in the prefix cache."
)
PREFIX_HITS: Final = _counter(
    "prefix_cache_hits_tokens_total", "Prompt tokens found in the prefix cache."
)
REPLAYS: Final = _counter(
    "request_replays_total", "Engines that died under a request and were outlived by it."
)
STALLS: Final = _counter("stream_stalls_total", "Writes that a reader blocked.")
STALLED_SECONDS: Final = _histogram(
    "stream_stalled_seconds",
    "Time for which its reader blocked a request, if it did.",
    _REQUEST_SECONDS_ENDS,
)

# The engine, from its steps.
RUNNING: Final = _gauge("num_requests_running", "Requests in the running batch.")
WAITING: Final = _gauge("num_requests_waiting", "Requests in the queue.")
WAITING_TOKENS: Final = _gauge("num_tokens_waiting", "Tokens of the requests in the queue.")
MAX_RUNNING: Final = _gauge("max_requests_running", "Most requests the batch can hold.")
KV_BLOCKS: Final = _gauge("kv_cache_blocks", "Blocks of the KV cache, by state.", "state")
KV_TOTAL: Final = _gauge("kv_cache_total_blocks", "All blocks of the KV cache.")
KV_BLOCK_SIZE: Final = _gauge("kv_cache_block_size_tokens", "Tokens of a block.")
KV_USAGE: Final = _gauge(
    "kv_cache_usage_ratio", "Blocks held by running requests, as a share of all: 0 to 1."
)
HEAD_WAITS: Final = _gauge(
    "queue_head_waits", "1 for what the next in line lacks, as of the last step.", "reason"
)
GENERATION_TOKENS: Final = _counter("generation_tokens_total", "Tokens generated.")
PREFILL_TOKENS: Final = _counter(
    "prefill_tokens_total", "Prompt tokens computed, recomputed ones included."
)
ADMISSIONS: Final = _counter("admissions_total", "Requests let into the batch, again included.")
PREEMPTIONS: Final = _counter("preemptions_total", "Requests that gave their memory back.")
SHORTENED_RETENTIONS: Final = _counter(
    "retentions_shortened_total", "Retentions that were cut to --max-retention-s."
)
DROPPED_RETENTIONS: Final = _counter(
    "retention_blocks_dropped_total",
    "Blocks that lost or never got their retention, for its budget.",
)
STEP_SECONDS: Final = _histogram(
    "step_seconds", "A step of the executor, from launch to result.", _TOKEN_SECONDS_ENDS
)
SCHEDULER_SECONDS: Final = _histogram(
    "scheduler_seconds", "Planning a step and taking its result in.", _OVERHEAD_SECONDS_ENDS
)
STEP_TOKENS: Final = _histogram("step_tokens", "Tokens computed in a step.", _TOKENS_ENDS)
STEP_BATCH: Final = _histogram("step_requests", "Requests that ran in a step.", _REQUESTS_ENDS)
STEP_ERROR: Final = _histogram(
    "step_prediction_error_seconds",
    "Between predicted and measured time of a step, either way.",
    _TOKEN_SECONDS_ENDS,
)
STEP_PREDICTED: Final = _counter(
    "step_predicted_seconds_total", "Predicted time of the steps that had a prediction."
)
STEP_MEASURED: Final = _counter(
    "step_measured_seconds_total", "Measured time of the steps that had a prediction."
)
MISSED_STEPS: Final = _counter(
    "steps_missed_total", "Steps that were overwritten before they were read for these metrics."
)
ENGINE_UP: Final = _gauge("engine_up", "1 if a front has an engine to send requests to.")
ENGINE_RESTARTS: Final = _counter("engine_restarts_total", "Engines started after the first.")

# The fronts.
FRONTS: Final = _gauge("fronts", "Front processes that are alive.")
DRAINING: Final = _gauge("draining", "1 once no new requests are taken.")
STREAMS: Final = _gauge("streams", "Open calls.")
LIVE: Final = _gauge("num_requests_live", "Requests that fronts hold.")
BACKLOG: Final = _gauge("stream_backlog_tokens", "Output that readers have not taken.")
CUT_READERS: Final = _counter("streams_cut_total", "Streams cut because their reader stalled.")
LATE_EVENTS: Final = _counter(
    "late_engine_events_total", "Events of the engine for requests that had gone."
)
UNKNOWN_FIELDS: Final = _counter(
    "unknown_fields_total", "Requests with fields that this server does not know."
)
LOWERED_PRIORITIES: Final = _counter(
    "priorities_lowered_total", "Priorities of requests that were lowered to their tenant's."
)
INTERNAL_ERRORS: Final = _counter("internal_errors_total", "Faults caught at the edge of a call.")
LOOP_LAG: Final = _histogram(
    "event_loop_lag_seconds", "How late event loops of fronts ran.", _OVERHEAD_SECONDS_ENDS
)
RECORDS: Final = _counter("records_total", "Records of ended requests that fronts made.")
RECORDS_DROPPED: Final = _counter(
    "records_dropped_total", "Records that never arrived, by reason.", "reason"
)
TRACES: Final = _counter("traces_total", "Traces, by what became of them.", "outcome")
SPANS: Final = _counter("spans_total", "Spans, by what became of them.", "outcome")
TRACE_DROPPED: Final = _counter("trace_dropped_total", "Traces or spans lost.", "reason")

# Only for tenants that the operator names.
TENANT_REQUESTS: Final = _counter(
    "tenant_requests_total", "Requests that ended.", "tenant", "outcome"
)
TENANT_PROMPT_TOKENS: Final = _counter("tenant_prompt_tokens_total", "Prompt tokens.", "tenant")
TENANT_GENERATION_TOKENS: Final = _counter(
    "tenant_generation_tokens_total", "Tokens generated.", "tenant"
)
TENANT_QUEUE: Final = _counter("tenant_queue_seconds_total", "Time in the queue.", "tenant")

# The machine and the build.
PROCESS_CPU: Final = _counter(
    "process_cpu_seconds_total", "CPU time of a process of the service.", "process"
)
PROCESS_MEMORY: Final = _gauge(
    "process_resident_memory_bytes", "Resident memory of a process of the service.", "process"
)
BUILD: Final = _gauge("build_info", "1, labelled with the version.", "version")

CATALOGUE: Final[tuple[MetricSpec, ...]] = tuple(_all)
