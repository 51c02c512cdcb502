"""Computes the attributes of spans: options and outcome of the request for the root span, wait
reasons and batch sizes for its children.

The attributes of the root have two parts: `start_attributes` are known when a request arrives and
are passed to the sampler; `end_attributes` are added to traces that are kept. Attributes that do
not apply to a request are left out. Text from clients is truncated to `MAX_TEXT` characters, except
captured content. Reasons that are not identifiers are replaced by `UNKNOWN_NAME`. With content
capture, the prompt and the outputs are JSON text in the form of the GenAI conventions 1.41.1.
"""

import json
import math
import re
from collections.abc import Sequence
from urllib.parse import unquote

from penstock.scheduler.events import Residency, Wait
from penstock.server.observe.config import TracingConfig
from penstock.server.observe.request_record import (
    ENGINE_LOST,
    RequestOptions,
    RequestRecord,
    Segment,
    SegmentKind,
)
from penstock.server.observe.spans import keys
from penstock.server.observe.status_codes import is_server_error, status_name


def input_messages(prompt: str) -> str:
    """Return the prompt as a JSON array with a single user message. The roles of a chat are not
    separate messages, because the chat template has merged them into the prompt."""
    return _to_json([_message("user", prompt)])


def output_messages(outputs: Sequence[str], finish_reasons: Sequence[str]) -> str:
    """Return a JSON array with one assistant message per output. Each message has the finish reason
    of its output if there is one."""
    messages = [_message("assistant", text) for text in outputs]
    for message, reason in zip(messages, finish_reasons, strict=False):
        message["finish_reason"] = reason
    return _to_json(messages)


def _message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _to_json(messages: list[dict[str, object]]) -> str:
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":"))


AttributeValue = str | bool | int | float | tuple[str, ...]
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
    """Return the attributes for the sampler. All are known when the request arrives."""
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
    record: RequestRecord, config: TracingConfig, *, model: str
) -> dict[str, AttributeValue]:
    """Return the attributes of the root span that are not in `start_attributes`. `model` is the
    name of the served model."""
    attributes: dict[str, AttributeValue] = {}
    _add_call(attributes, record, has_next_rpc_keys=config.has_next_rpc_keys)
    _add_options(attributes, record.options)
    _add_response(attributes, record, model)
    _add_latency(attributes, record)
    _add_request_facts(attributes, record)
    if config.has_content and record.content is not None:
        attributes[keys.INPUT_MESSAGES] = input_messages(record.content.prompt)
        attributes[keys.OUTPUT_MESSAGES] = output_messages(
            record.content.outputs, finish_reasons(record)
        )
    return attributes


def finish_reasons(record: RequestRecord) -> tuple[str, ...]:
    """Return the finish reason of each output in lower case (such as `stop`), as the GenAI
    conventions require."""
    return tuple(_name(reason).lower() for reason in record.finish_reasons)


def was_admitted(record: RequestRecord) -> bool:
    """Return True if the request was admitted to the batch. Otherwise no tokens were processed."""
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
    """Return the total seconds in segments of this kind; None without such a segment."""
    parts = [segment.end_s - segment.start_s for segment in segments if segment.kind is kind]
    return math.fsum(parts) if parts else None


def _add_request_facts(attributes: dict[str, AttributeValue], record: RequestRecord) -> None:
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
    """Return the name of a reason; `UNKNOWN_NAME` for free text, because this may quote a
    prompt."""
    return text if _NAME.fullmatch(text) else UNKNOWN_NAME


_WAIT_PARTS = (
    (keys.QUEUE_BLOCKS, "blocks"),
    (keys.QUEUE_SLOTS, "slots"),
    (keys.QUEUE_BUDGET, "token_budget"),
    (keys.QUEUE_FAIRNESS, "fairness"),
    (keys.QUEUE_OTHER, "other"),
)


def segment_attributes(record: RequestRecord, index: int) -> dict[str, AttributeValue]:
    """Return the attributes of segment `record.segments[index]`. PREPARE and DELIVER have none."""
    segment = record.segments[index]
    match segment.kind:
        case SegmentKind.QUEUE:
            return _of_queue(record, index)
        case SegmentKind.PREFILL:
            return _of_prefill(record.segments, index)
        case SegmentKind.DECODE:
            return _of_decode(segment)
        case SegmentKind.PREPARE | SegmentKind.DELIVER:
            return {}


def _of_queue(record: RequestRecord, index: int) -> dict[str, AttributeValue]:
    segments = record.segments
    attributes: dict[str, AttributeValue] = {keys.QUEUE_OUTCOME: _outcome(record, index)}
    is_first = all(s.kind is not SegmentKind.QUEUE for s in segments[:index])
    if is_first and record.num_ahead >= 0:
        attributes[keys.QUEUE_POSITION] = record.num_ahead
    wait = segments[index].wait
    if wait is not None:
        _add_wait(attributes, wait)
    elif segments[index].is_engine_lost:
        attributes[keys.QUEUE_REASON] = ENGINE_LOST
    return attributes


def _add_wait(attributes: dict[str, AttributeValue], wait: Wait) -> None:
    longest_s = 0.0
    for key, reason in _WAIT_PARTS:
        part_s: float = getattr(wait, f"{reason}_s")
        if part_s > 0:
            attributes[key] = part_s
        if part_s > longest_s:
            longest_s = part_s
            attributes[keys.QUEUE_REASON] = reason
    if wait.num_passed_by:
        attributes[keys.QUEUE_PASSED_BY] = wait.num_passed_by


def _outcome(record: RequestRecord, index: int) -> str:
    """Return how a wait ended: `admitted`, `deadline`, `cancelled`, `finished` or `failed`.

    If the engine died during the wait, returns `engine_lost`, or `resubmitted` if a new engine
    queued the request at once. For a wait for a new engine, returns `resubmitted` if that engine
    queued the request.
    """
    after = record.segments[index + 1 : index + 2]
    if after and after[0].kind in (SegmentKind.PREFILL, SegmentKind.DECODE):
        return "admitted"
    if after and after[0].kind is SegmentKind.QUEUE:
        return ENGINE_LOST if after[0].is_engine_lost else "resubmitted"
    match status_name(record.code):
        case "DEADLINE_EXCEEDED":
            return "deadline"
        case "CANCELLED":
            return "cancelled"
        case "OK":
            return "cancelled" if "CANCELLED" in record.finish_reasons else "finished"
        case _:
            return "failed"


def _of_prefill(segments: Sequence[Segment], index: int) -> dict[str, AttributeValue]:
    segment = segments[index]
    attributes: dict[str, AttributeValue] = {keys.PREFILL_CACHED: segment.num_cached_tokens}
    residency = segment.residency
    if residency is None and index + 1 < len(segments):
        after = segments[index + 1]
        residency = after.residency if after.kind is SegmentKind.DECODE else None
    if residency is not None and residency.num_chunks:
        attributes[keys.PREFILL_CHUNKS] = residency.num_chunks
    if segment.residency is not None:
        _add_batch(attributes, segment.residency)
    return attributes


def _of_decode(segment: Segment) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {keys.DECODE_TOKENS: segment.num_tokens}
    residency = segment.residency
    if residency is not None:
        # The time in the batch includes the steps of its prefill.
        attributes[keys.DECODE_STEPS] = max(0, residency.num_steps - residency.num_chunks)
        _add_batch(attributes, residency)
    return attributes


def _add_batch(attributes: dict[str, AttributeValue], residency: Residency) -> None:
    if residency.max_batch_size:
        attributes[keys.BATCH_MIN] = residency.min_batch_size
        attributes[keys.BATCH_MAX] = residency.max_batch_size
