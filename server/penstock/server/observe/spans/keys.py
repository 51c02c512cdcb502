"""The one table of attribute keys: what a span may say of a request, and on which span it says it.

Owns names only. Whoever needs a key takes it from here, so that a new release of the conventions is
an edit of this file; the page docs/tracing.md is checked against it.

RPC keys are those of the OpenTelemetry semantic conventions 1.44, `rpc.status_code` is what follows
on them. `gen_ai.*` is from 1.41.1, the last release that had them; `gen_ai.latency.*` is in no
convention, but vLLM, SGLang and TensorRT-LLM all write it. Tokens used stand on the root alone:
dashboards add them up over spans.
"""

import enum
from dataclasses import dataclass

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
PREEMPTED_EVENT = "penstock.preempted"
REPLAYED_EVENT = "penstock.replayed"


class Place(enum.StrEnum):
    """The span that carries a key. Children are named as `SegmentKind` names them."""

    ROOT = "root"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    STAY = "decode, or prefill if that is where it ended"


@dataclass(frozen=True, slots=True)
class Key:
    """One attribute: its name, its span, what it says."""

    name: str
    place: Place
    meaning: str


_table: list[Key] = []


def _key(name: str, place: Place, meaning: str) -> str:
    _table.append(Key(name, place, meaning))
    return name


_ROOT = Place.ROOT

RPC_SYSTEM = _key("rpc.system.name", _ROOT, "`grpc`")
RPC_METHOD = _key("rpc.method", _ROOT, "the RPC's full name, the span's name too")
RPC_STATUS = _key("rpc.response.status_code", _ROOT, "name of the gRPC status it ended with")
RPC_STATUS_NEXT = _key("rpc.status_code", _ROOT, "the same, under the coming name; if switched on")
ERROR_TYPE = _key("error.type", _ROOT, "the status, where it makes the span an error")
PEER_ADDRESS = _key("network.peer.address", _ROOT, "the client's address")
PEER_PORT = _key("network.peer.port", _ROOT, "the client's port")

OPERATION = _key("gen_ai.operation.name", _ROOT, "`chat` or `text_completion`")
PROVIDER = _key("gen_ai.provider.name", _ROOT, "`penstock`")
REQUEST_MODEL = _key(
    "gen_ai.request.model", _ROOT, "the served model's own name, unless another was asked for"
)
REQUEST_STREAM = _key("gen_ai.request.stream", _ROOT, "whether tokens were to come one by one")
REQUEST_CHOICES = _key("gen_ai.request.choice.count", _ROOT, "outputs asked for, if not one")
REQUEST_MAX_TOKENS = _key("gen_ai.request.max_tokens", _ROOT, "if asked for")
REQUEST_TEMPERATURE = _key("gen_ai.request.temperature", _ROOT, "if asked for")
REQUEST_TOP_P = _key("gen_ai.request.top_p", _ROOT, "if asked for")
REQUEST_TOP_K = _key("gen_ai.request.top_k", _ROOT, "if asked for")
REQUEST_FREQUENCY_PENALTY = _key("gen_ai.request.frequency_penalty", _ROOT, "if asked for")
REQUEST_PRESENCE_PENALTY = _key("gen_ai.request.presence_penalty", _ROOT, "if asked for")
REQUEST_SEED = _key("gen_ai.request.seed", _ROOT, "if asked for")
RESPONSE_ID = _key("gen_ai.response.id", _ROOT, "the request's id")
RESPONSE_MODEL = _key("gen_ai.response.model", _ROOT, "the model that answered")
RESPONSE_FINISH_REASONS = _key("gen_ai.response.finish_reasons", _ROOT, "one for each output")
USAGE_INPUT = _key("gen_ai.usage.input_tokens", _ROOT, "prompt, once it was admitted")
USAGE_OUTPUT = _key("gen_ai.usage.output_tokens", _ROOT, "completion, once it was admitted")
USAGE_CACHED = _key("gen_ai.usage.cache_read.input_tokens", _ROOT, "prompt found in the cache")
INPUT_MESSAGES = _key("gen_ai.input.messages", _ROOT, "the prompt; content capture only")
OUTPUT_MESSAGES = _key("gen_ai.output.messages", _ROOT, "the outputs; content capture only")

LATENCY_QUEUE = _key("gen_ai.latency.time_in_queue", _ROOT, "seconds waited, all stays")
LATENCY_TTFT = _key("gen_ai.latency.time_to_first_token", _ROOT, "seconds from its arrival")
LATENCY_E2E = _key("gen_ai.latency.e2e", _ROOT, "seconds from arrival to the end of the call")
LATENCY_PREFILL = _key("gen_ai.latency.time_in_model_prefill", _ROOT, "seconds, all stays")
LATENCY_DECODE = _key("gen_ai.latency.time_in_model_decode", _ROOT, "seconds, all stays")
LATENCY_INFERENCE = _key("gen_ai.latency.time_in_model_inference", _ROOT, "both of them")

SAMPLING_REASON = _key("penstock.sampling.reason", _ROOT, "why this trace was kept")
ERROR_REASON = _key("penstock.error.reason", _ROOT, "the `ErrorReason` of whatever went wrong")
FRONT_ID = _key("penstock.front.id", _ROOT, "the front process that served it")
TENANT = _key("penstock.tenant", _ROOT, "whose request it is, if anybody's")
PRIORITY = _key("penstock.priority", _ROOT, "if not 0; higher is more urgent")
PROMPT_TOKENS = _key("penstock.prompt_tokens", _ROOT, "prompt of one that never got in")
QUEUE_ESTIMATE = _key("penstock.queue.estimated_s", _ROOT, "seconds of waiting foretold")
PREEMPTIONS = _key("penstock.preemptions", _ROOT, "how often it lost its blocks")
REPLAYS = _key("penstock.replays", _ROOT, "engines that it outlived")
MESSAGES = _key("penstock.messages", _ROOT, "messages that were sent")
STALLS = _key("penstock.stalls", _ROOT, "writes that its reader blocked")
STALLED = _key("penstock.stalled_s", _ROOT, "seconds they were blocked")

QUEUE_REASON = _key("penstock.queue.reason", Place.QUEUE, "what held it up longest")
QUEUE_OUTCOME = _key("penstock.queue.outcome", Place.QUEUE, "how the wait ended")
QUEUE_BLOCKS = _key("penstock.queue.blocks_s", Place.QUEUE, "seconds for want of cache blocks")
QUEUE_SLOTS = _key("penstock.queue.slots_s", Place.QUEUE, "seconds for want of a batch slot")
QUEUE_BUDGET = _key("penstock.queue.token_budget_s", Place.QUEUE, "seconds, token budget spent")
QUEUE_FAIRNESS = _key("penstock.queue.fairness_s", Place.QUEUE, "seconds, another's turn")
QUEUE_OTHER = _key("penstock.queue.other_s", Place.QUEUE, "seconds; nothing was lacking")
QUEUE_POSITION = _key("penstock.queue.position", Place.QUEUE, "requests before it on arrival")
QUEUE_PASSED_BY = _key("penstock.queue.passed_by", Place.QUEUE, "later ones let in before it")

PREFILL_CACHED = _key("penstock.prefill.cached_tokens", Place.PREFILL, "found in the cache")
PREFILL_CHUNKS = _key("penstock.prefill.chunks", Place.PREFILL, "steps that computed it")
DECODE_TOKENS = _key("penstock.decode.tokens", Place.DECODE, "tokens that came out")
DECODE_STEPS = _key("penstock.decode.steps", Place.DECODE, "steps that it took part in")
BATCH_MIN = _key("penstock.batch.min_size", Place.STAY, "fewest requests in a step of its")
BATCH_MAX = _key("penstock.batch.max_size", Place.STAY, "most requests in a step of its")

KEYS: tuple[Key, ...] = tuple(_table)
