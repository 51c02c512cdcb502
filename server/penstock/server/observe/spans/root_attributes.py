"""What the root span says: of the call, of what was asked for, of what came of it.

Two parts: `start_attributes` is known when a request arrives and is shown to the sampler,
`end_attributes` is added to traces that are kept. What did not happen has no attribute. Whatever a
client wrote is cut at `MAX_TEXT`; names of reasons that are no names are not repeated.
"""

import math
import re
from urllib.parse import unquote

from penstock.server.observe.request_record import (
    RequestOptions,
    RequestRecord,
    Segment,
    SegmentKind,
)
from penstock.server.observe.spans import keys
from penstock.server.observe.spans.content import input_messages, output_messages
from penstock.server.observe.spans.span_plan import AttributeValue
from penstock.server.observe.spans.status import is_server_error, status_name

MAX_TEXT = 256
PROVIDER_NAME = "penstock"
UNKNOWN_NAME = "other"

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_PEER = re.compile(r"ipv[46]:(?P<address>.+):(?P<port>\d{1,5})")

_OPTION_KEYS = (
    (keys.REQUEST_MAX_TOKENS, "max_tokens"),
    (keys.REQUEST_TEMPERATURE, "temperature"),
    (keys.REQUEST_TOP_P, "top_p"),
    (keys.REQUEST_TOP_K, "top_k"),
    (keys.REQUEST_FREQUENCY_PENALTY, "frequency_penalty"),
    (keys.REQUEST_PRESENCE_PENALTY, "presence_penalty"),
    (keys.REQUEST_SEED, "seed"),
)


def start_attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    """What the conventions want a sampler to see."""
    options = record.options
    attributes: dict[str, AttributeValue] = {
        keys.RPC_SYSTEM: "grpc",
        keys.RPC_METHOD: record.method,
        keys.OPERATION: "chat" if options.is_chat else "text_completion",
        keys.PROVIDER: PROVIDER_NAME,
    }
    if record.model:
        attributes[keys.REQUEST_MODEL] = record.model[:MAX_TEXT]
    return attributes


def end_attributes(
    record: RequestRecord, *, model: str, has_content: bool, has_next_rpc_keys: bool
) -> dict[str, AttributeValue]:
    """All the rest. `model`: the one that is served."""
    attributes: dict[str, AttributeValue] = {}
    _add_call(attributes, record, has_next_rpc_keys=has_next_rpc_keys)
    _add_options(attributes, record.options)
    _add_response(attributes, record, model)
    _add_latency(attributes, record)
    _add_story(attributes, record)
    if has_content and record.content is not None:
        attributes[keys.INPUT_MESSAGES] = input_messages(record.content.prompt)
        attributes[keys.OUTPUT_MESSAGES] = output_messages(
            record.content.outputs, finish_reasons(record)
        )
    return attributes


def finish_reasons(record: RequestRecord) -> tuple[str, ...]:
    """One for each output, as the conventions spell them: `stop`, `length`, ..."""
    return tuple(_name(reason).lower() for reason in record.finish_reasons)


def was_admitted(record: RequestRecord) -> bool:
    """Whether the model worked for it: only then were tokens used."""
    in_batch = (SegmentKind.PREFILL, SegmentKind.DECODE)
    return record.num_completion_tokens > 0 or any(s.kind in in_batch for s in record.segments)


def _add_call(
    attributes: dict[str, AttributeValue], record: RequestRecord, *, has_next_rpc_keys: bool
) -> None:
    status = status_name(record.code)
    attributes[keys.RPC_STATUS] = status
    if has_next_rpc_keys:
        attributes[keys.RPC_STATUS_NEXT] = status
    if is_server_error(record.code):
        attributes[keys.ERROR_TYPE] = status
    if record.reason:
        attributes[keys.ERROR_REASON] = _name(record.reason)
    if peer := _PEER.fullmatch(record.peer[:MAX_TEXT]):
        attributes[keys.PEER_ADDRESS] = unquote(peer["address"]).strip("[]")
        attributes[keys.PEER_PORT] = int(peer["port"])
    elif record.peer.startswith("unix:") and len(record.peer) > len("unix:"):
        attributes[keys.PEER_ADDRESS] = record.peer[len("unix:") :][:MAX_TEXT]


def _add_options(attributes: dict[str, AttributeValue], options: RequestOptions) -> None:
    attributes[keys.REQUEST_STREAM] = options.is_stream
    if options.num_outputs != 1:
        attributes[keys.REQUEST_CHOICES] = options.num_outputs
    for key, field in _OPTION_KEYS:
        value = getattr(options, field)
        if value is not None:
            attributes[key] = value


def _add_response(attributes: dict[str, AttributeValue], record: RequestRecord, model: str) -> None:
    if record.request_id:
        attributes[keys.RESPONSE_ID] = record.request_id[:MAX_TEXT]
    if record.finish_reasons:
        attributes[keys.RESPONSE_FINISH_REASONS] = finish_reasons(record)
    if was_admitted(record):
        if model:
            attributes[keys.RESPONSE_MODEL] = model
        attributes[keys.USAGE_INPUT] = record.num_prompt_tokens
        attributes[keys.USAGE_OUTPUT] = record.num_completion_tokens
        attributes[keys.USAGE_CACHED] = record.num_cached_tokens
    elif record.num_prompt_tokens:
        attributes[keys.PROMPT_TOKENS] = record.num_prompt_tokens


def _add_latency(attributes: dict[str, AttributeValue], record: RequestRecord) -> None:
    queue_s = _time_in(record.segments, SegmentKind.QUEUE)
    prefill_s = _time_in(record.segments, SegmentKind.PREFILL)
    decode_s = _time_in(record.segments, SegmentKind.DECODE)
    attributes[keys.LATENCY_E2E] = record.end_s - record.arrival_s
    if queue_s is not None:
        attributes[keys.LATENCY_QUEUE] = queue_s
    if math.isfinite(record.ttft_s):
        attributes[keys.LATENCY_TTFT] = record.ttft_s
    if prefill_s is not None:
        attributes[keys.LATENCY_PREFILL] = prefill_s
    if decode_s is not None:
        attributes[keys.LATENCY_DECODE] = decode_s
    if prefill_s is not None or decode_s is not None:
        attributes[keys.LATENCY_INFERENCE] = (prefill_s or 0.0) + (decode_s or 0.0)


def _time_in(segments: tuple[Segment, ...], kind: SegmentKind) -> float | None:
    """Seconds spent so; None if it never was."""
    parts = [segment.end_s - segment.start_s for segment in segments if segment.kind is kind]
    return math.fsum(parts) if parts else None


def _add_story(attributes: dict[str, AttributeValue], record: RequestRecord) -> None:
    attributes[keys.FRONT_ID] = record.front_id
    attributes[keys.MESSAGES] = record.num_messages
    if record.tenant:
        attributes[keys.TENANT] = record.tenant[:MAX_TEXT]
    if math.isfinite(record.estimated_queue_s):
        attributes[keys.QUEUE_ESTIMATE] = record.estimated_queue_s
    for key, number in (
        (keys.PRIORITY, record.options.priority),
        (keys.PREEMPTIONS, record.num_preemptions),
        (keys.REPLAYS, record.num_replays),
        (keys.STALLS, record.num_stalls),
        (keys.STALLED, record.stalled_s),
    ):
        if number:
            attributes[key] = number


def _name(text: str) -> str:
    """The name of a reason. Anything else is text, and text may be anything."""
    return text if _NAME.fullmatch(text) else UNKNOWN_NAME
