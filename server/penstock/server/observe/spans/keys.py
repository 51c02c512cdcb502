"""Defines the keys of all span attributes of a request, and the span to which each belongs.

All keys are imported from here, so that a new release of the conventions changes only this file.
docs/telemetry.md is generated from it.

The RPC keys are from the OpenTelemetry semantic conventions 1.44, except `rpc.status_code`, the
announced next name of `rpc.response.status_code`. The `gen_ai.*` keys are from 1.41.1, the last
release that had them. `gen_ai.latency.*` is in no convention, but vLLM, SGLang and TensorRT-LLM all
use it. Token usage is on the root span only, because dashboards sum it over spans.
"""

import enum
from dataclasses import dataclass

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
PREEMPTED_EVENT = "penstock.preempted"
REPLAYED_EVENT = "penstock.replayed"


class SpanOfKey(enum.StrEnum):
    """The span to which a key belongs. Child spans have the names of `SegmentKind`. RESIDENCY is
    the last span of an interval in the running batch."""

    ROOT = "root"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    RESIDENCY = "decode; prefill if there is no decode"


@dataclass(frozen=True, slots=True)
class AttributeKey:
    """The key of one span attribute. `place` is the span that has it, `meaning` its description."""

    name: str
    place: SpanOfKey
    meaning: str


_table: list[AttributeKey] = []


def _key(name: str, place: SpanOfKey, meaning: str) -> str:
    _table.append(AttributeKey(name, place, meaning))
    return name


_ROOT = SpanOfKey.ROOT

RPC_SYSTEM = _key("rpc.system.name", _ROOT, "`grpc`")
RPC_METHOD = _key("rpc.method", _ROOT, "full name of the RPC, also the span's name")
RPC_STATUS = _key("rpc.response.status_code", _ROOT, "name of the final gRPC status")
RPC_STATUS_NEXT = _key("rpc.status_code", _ROOT, "the same under its future name; opt-in")
ERROR_TYPE = _key("error.type", _ROOT, "the status, if the span is an error")
PEER_ADDRESS = _key("network.peer.address", _ROOT, "the client's address")
PEER_PORT = _key("network.peer.port", _ROOT, "the client's port")

OPERATION = _key("gen_ai.operation.name", _ROOT, "`chat` or `text_completion`")
PROVIDER = _key("gen_ai.provider.name", _ROOT, "`penstock`")
REQUEST_MODEL = _key(
    "gen_ai.request.model", _ROOT, "the served model, unless the request names another"
)
REQUEST_STREAM = _key("gen_ai.request.stream", _ROOT, "whether the call streams")
REQUEST_CHOICES = _key("gen_ai.request.choice.count", _ROOT, "requested outputs, if not one")
REQUEST_MAX_TOKENS = _key("gen_ai.request.max_tokens", _ROOT, "if set")
REQUEST_TEMPERATURE = _key("gen_ai.request.temperature", _ROOT, "if set")
REQUEST_TOP_P = _key("gen_ai.request.top_p", _ROOT, "if set")
REQUEST_TOP_K = _key("gen_ai.request.top_k", _ROOT, "if set")
REQUEST_FREQUENCY_PENALTY = _key("gen_ai.request.frequency_penalty", _ROOT, "if set")
REQUEST_PRESENCE_PENALTY = _key("gen_ai.request.presence_penalty", _ROOT, "if set")
REQUEST_SEED = _key("gen_ai.request.seed", _ROOT, "if set")
RESPONSE_ID = _key("gen_ai.response.id", _ROOT, "request id")
RESPONSE_MODEL = _key("gen_ai.response.model", _ROOT, "served model")
RESPONSE_FINISH_REASONS = _key("gen_ai.response.finish_reasons", _ROOT, "one per output")
USAGE_INPUT = _key("gen_ai.usage.input_tokens", _ROOT, "prompt tokens, once admitted")
USAGE_OUTPUT = _key("gen_ai.usage.output_tokens", _ROOT, "output tokens, once admitted")
USAGE_CACHED = _key(
    "gen_ai.usage.cache_read.input_tokens", _ROOT, "prompt tokens found in the cache"
)
INPUT_MESSAGES = _key("gen_ai.input.messages", _ROOT, "prompt; content capture only")
OUTPUT_MESSAGES = _key("gen_ai.output.messages", _ROOT, "outputs; content capture only")

LATENCY_QUEUE = _key("gen_ai.latency.time_in_queue", _ROOT, "seconds, all queue spans")
LATENCY_TTFT = _key("gen_ai.latency.time_to_first_token", _ROOT, "seconds from arrival")
LATENCY_E2E = _key("gen_ai.latency.e2e", _ROOT, "seconds from arrival to the end of the call")
LATENCY_PREFILL = _key("gen_ai.latency.time_in_model_prefill", _ROOT, "seconds, all prefill spans")
LATENCY_DECODE = _key("gen_ai.latency.time_in_model_decode", _ROOT, "seconds, all decode spans")
LATENCY_INFERENCE = _key("gen_ai.latency.time_in_model_inference", _ROOT, "sum of the two")

SAMPLING_REASON = _key("penstock.sampling.reason", _ROOT, "why the trace was kept")
ERROR_REASON = _key("penstock.error.reason", _ROOT, "`ErrorReason` of the failure")
FRONT_ID = _key("penstock.front.id", _ROOT, "front process")
TENANT = _key("penstock.tenant", _ROOT, "tenant, if any")
PRIORITY = _key("penstock.priority", _ROOT, "if not 0; higher is more urgent")
PROMPT_TOKENS = _key("penstock.prompt_tokens", _ROOT, "prompt tokens, if never admitted")
QUEUE_ESTIMATE = _key("penstock.queue.estimated_s", _ROOT, "predicted seconds in the queue")
PREEMPTIONS = _key("penstock.preemptions", _ROOT, "number of preemptions")
REPLAYS = _key("penstock.replays", _ROOT, "engines lost")
MESSAGES = _key("penstock.messages", _ROOT, "messages sent")
STALLS = _key("penstock.stalls", _ROOT, "writes blocked by the client")
STALLED = _key("penstock.stalled_s", _ROOT, "seconds of blocked writes")

QUEUE_REASON = _key("penstock.queue.reason", SpanOfKey.QUEUE, "the reason with the longest wait")
QUEUE_OUTCOME = _key("penstock.queue.outcome", SpanOfKey.QUEUE, "how the wait ended")
QUEUE_BLOCKS = _key("penstock.queue.blocks_s", SpanOfKey.QUEUE, "seconds without KV blocks")
QUEUE_SLOTS = _key("penstock.queue.slots_s", SpanOfKey.QUEUE, "seconds without a slot")
QUEUE_BUDGET = _key(
    "penstock.queue.token_budget_s", SpanOfKey.QUEUE, "seconds with the token budget used up"
)
QUEUE_FAIRNESS = _key("penstock.queue.fairness_s", SpanOfKey.QUEUE, "seconds behind another tenant")
QUEUE_OTHER = _key(
    "penstock.queue.other_s", SpanOfKey.QUEUE, "seconds until the next step was planned"
)
QUEUE_POSITION = _key("penstock.queue.position", SpanOfKey.QUEUE, "requests ahead on arrival")
QUEUE_PASSED_BY = _key("penstock.queue.passed_by", SpanOfKey.QUEUE, "later requests admitted first")

PREFILL_CACHED = _key(
    "penstock.prefill.cached_tokens", SpanOfKey.PREFILL, "prompt tokens found in the cache"
)
PREFILL_CHUNKS = _key("penstock.prefill.chunks", SpanOfKey.PREFILL, "steps")
DECODE_TOKENS = _key("penstock.decode.tokens", SpanOfKey.DECODE, "output tokens")
DECODE_STEPS = _key("penstock.decode.steps", SpanOfKey.DECODE, "steps")
BATCH_MIN = _key(
    "penstock.batch.min_size", SpanOfKey.RESIDENCY, "minimum number of requests in its steps"
)
BATCH_MAX = _key(
    "penstock.batch.max_size", SpanOfKey.RESIDENCY, "maximum number of requests in its steps"
)

KEYS: tuple[AttributeKey, ...] = tuple(_table)
