"""A record becomes a trace of spans, with the attributes of each kind of end."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from penstock.scheduler.events import Residency, Wait
from penstock.server.observe.request_record import (
    Content,
    RequestOptions,
    Segment,
    SegmentKind,
)
from penstock.server.observe.spans import keys
from penstock.server.observe.spans.attributes import MAX_TEXT, start_attributes
from penstock.server.observe.spans.span_writer import MAX_CHILDREN
from penstock.server.observe.status_codes import is_server_error, status_name
from support.reports import (
    GENERATE,
    RESIDENCY,
    preempted_record,
    rejected_record,
    request_record,
    trace_parent,
)
from support.span_trees import SpanTree, tree_of

SECOND_NS = 10**9


def child(tree: SpanTree, name: str, nth: int = 0) -> SpanTree:
    return [span for span in tree.children if span.name == name][nth]


def test_the_root_is_named_by_the_rpc_and_describes_the_call() -> None:
    record = request_record()
    tree = tree_of(record)
    assert (tree.name, tree.start_ns, tree.end_ns) == (GENERATE, 100 * SECOND_NS, 102 * SECOND_NS)
    assert tree.span_id == int.from_bytes(record.trace.span_id, "big")
    assert start_attributes(record) == {
        "rpc.system.name": "grpc",
        "rpc.method": GENERATE,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "tiny",
    }
    assert tree.attributes == {
        "rpc.response.status_code": "OK",
        "network.peer.address": "127.0.0.1",
        "network.peer.port": 50123,
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": "request-1",
        "gen_ai.response.model": "tiny-served",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 96,
        "gen_ai.usage.output_tokens": 17,
        "gen_ai.usage.cache_read.input_tokens": 32,
        "gen_ai.latency.e2e": 2.0,
        "gen_ai.latency.time_in_queue": pytest.approx(0.5),
        "gen_ai.latency.time_to_first_token": 0.7,
        "gen_ai.latency.time_in_model_prefill": pytest.approx(0.19),
        "gen_ai.latency.time_in_model_decode": pytest.approx(1.25),
        "gen_ai.latency.time_in_model_inference": pytest.approx(1.44),
        "penstock.front.id": 3,
        "penstock.tenant": "acme",
        "penstock.messages": 18,
        "penstock.queue.estimated_s": 0.4,
    }
    assert not tree.is_error
    assert tree.events == ()


def test_children_are_the_segments_and_have_reasons() -> None:
    tree = tree_of(request_record())
    assert [span.name for span in tree.children] == [
        "prepare",
        "queue",
        "prefill",
        "decode",
        "deliver",
    ]
    assert child(tree, "queue").attributes == {
        "penstock.queue.outcome": "admitted",
        "penstock.queue.position": 5,
        "penstock.queue.reason": "blocks",
        "penstock.queue.blocks_s": 0.3,
        "penstock.queue.slots_s": 0.05,
        "penstock.queue.token_budget_s": 0.1,
        "penstock.queue.other_s": 0.05,
        "penstock.queue.passed_by": 2,
    }
    assert child(tree, "prefill").attributes == {
        "penstock.prefill.cached_tokens": 32,
        "penstock.prefill.chunks": 3,
    }
    assert child(tree, "decode").attributes == {
        "penstock.decode.tokens": 17,
        "penstock.decode.steps": 17,
        "penstock.batch.min_size": 4,
        "penstock.batch.max_size": 9,
    }
    assert child(tree, "prepare").attributes == child(tree, "deliver").attributes == {}


@pytest.mark.parametrize(
    ("code", "reason", "status", "is_error"),
    [
        (1, "", "CANCELLED", False),
        (2, "INTERNAL", "UNKNOWN", True),
        (3, "INVALID_ARGUMENT", "INVALID_ARGUMENT", False),
        (4, "DEADLINE_UNREACHABLE", "DEADLINE_EXCEEDED", True),
        (5, "MODEL_NOT_FOUND", "NOT_FOUND", False),
        (6, "REQUEST_ID_IN_USE", "ALREADY_EXISTS", False),
        (8, "QUEUE_FULL", "RESOURCE_EXHAUSTED", False),
        (12, "FEATURE_UNSUPPORTED", "UNIMPLEMENTED", True),
        (13, "INTERNAL", "INTERNAL", True),
        (14, "ENGINE_DOWN", "UNAVAILABLE", True),
        (15, "", "DATA_LOSS", True),
        (16, "UNAUTHENTICATED", "UNAUTHENTICATED", False),
    ],
)
def test_a_status_is_an_error_only_where_the_conventions_require_it(
    code: int, reason: str, status: str, is_error: bool
) -> None:
    tree = tree_of(rejected_record(code, reason))
    assert tree.is_error is is_error
    assert tree.attributes[keys.RPC_STATUS] == status
    assert tree.attributes.get(keys.ERROR_TYPE) == (status if is_error else None)
    assert tree.attributes.get(keys.ERROR_REASON) == (reason or None)


def test_invalid_status_codes_are_unknown() -> None:
    assert {status_name(code) for code in (-1, 17, 99)} == {"UNKNOWN"}
    assert is_server_error(99)
    assert not is_server_error(0)


def test_a_rejected_request_has_no_tokens_and_only_the_phases_it_reached() -> None:
    tree = tree_of(rejected_record(8, "QUEUE_FULL"))
    assert [span.name for span in tree.children] == ["prepare"]
    assert tree.attributes[keys.PROMPT_TOKENS] == 96
    reported = set(tree.attributes)
    assert not reported & {
        keys.USAGE_INPUT,
        keys.USAGE_OUTPUT,
        keys.USAGE_CACHED,
        keys.RESPONSE_MODEL,
    }
    assert {key for key in reported if key.startswith("gen_ai.latency.")} == {keys.LATENCY_E2E}
    assert keys.RESPONSE_FINISH_REASONS not in reported


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"code": 4, "reason": "DEADLINE_EXCEEDED"}, "deadline"),
        ({"code": 1}, "cancelled"),
        ({"code": 0, "finish_reasons": ("CANCELLED",)}, "cancelled"),
        ({"code": 0, "finish_reasons": ("LENGTH",)}, "finished"),
        ({"code": 14, "reason": "ENGINE_DOWN"}, "failed"),
    ],
)
def test_a_wait_that_ended_without_admission_reports_its_outcome(
    changes: dict[str, Any], outcome: str
) -> None:
    segments = (
        Segment(SegmentKind.PREPARE, 100.0, 100.1),
        Segment(SegmentKind.QUEUE, 100.1, 100.9, wait=Wait(fairness_s=0.8)),
        Segment(SegmentKind.DELIVER, 100.9, 102.0),
    )
    queue = child(tree_of(request_record(segments=segments, **changes)), "queue")
    assert queue.attributes[keys.QUEUE_OUTCOME] == outcome
    assert queue.attributes[keys.QUEUE_REASON] == "fairness"


def test_an_unexplained_wait_has_no_reason() -> None:
    segments = (Segment(SegmentKind.QUEUE, 100.0, 102.0),)
    record = request_record(segments=segments, num_ahead=-1)
    assert child(tree_of(record), "queue").attributes == {keys.QUEUE_OUTCOME: "finished"}


def test_a_preemption_is_an_event_and_a_second_residency() -> None:
    tree = tree_of(preempted_record())
    assert list(tree.events) == [("penstock.preempted", 100_800_000_000)]
    assert tree.attributes[keys.PREEMPTIONS] == 1
    assert child(tree, "queue", 0).attributes[keys.QUEUE_POSITION] == 5
    assert keys.QUEUE_POSITION not in child(tree, "queue", 1).attributes
    assert child(tree, "queue", 1).attributes[keys.QUEUE_REASON] == "blocks"
    assert child(tree, "prefill", 1).attributes[keys.PREFILL_CHUNKS] == 1
    assert child(tree, "decode", 1).attributes[keys.DECODE_STEPS] == 8


def test_the_death_of_an_engine_is_no_preemption() -> None:
    segments = (
        Segment(SegmentKind.QUEUE, 100.0, 100.1),
        Segment(SegmentKind.DECODE, 100.1, 100.5),
        Segment(SegmentKind.QUEUE, 100.5, 101.0),
        Segment(SegmentKind.DECODE, 101.0, 101.5, residency=RESIDENCY),
        Segment(SegmentKind.QUEUE, 101.5, 102.0),
    )
    tree = tree_of(request_record(segments=segments, num_replays=1, num_preemptions=1))
    assert [name for name, _ in tree.events] == ["penstock.replayed", "penstock.preempted"]
    assert tree.attributes[keys.REPLAYS] == 1


def test_the_time_without_an_engine_is_a_separate_wait() -> None:
    segments = (
        Segment(SegmentKind.DECODE, 100.0, 100.5),
        Segment(SegmentKind.QUEUE, 100.5, 101.0, is_engine_lost=True),
        Segment(SegmentKind.QUEUE, 101.0, 101.2, wait=Wait(slots_s=0.2)),
        Segment(SegmentKind.QUEUE, 101.2, 101.5, is_engine_lost=True),
        Segment(SegmentKind.QUEUE, 101.5, 101.6),
        Segment(SegmentKind.PREFILL, 101.6, 102.0),
    )
    tree = tree_of(request_record(segments=segments, num_replays=2))
    waits = [one.attributes for one in tree.children if one.name == "queue"]
    assert [wait[keys.QUEUE_OUTCOME] for wait in waits] == [
        "resubmitted",
        "engine_lost",
        "resubmitted",
        "admitted",
    ]
    reasons = [wait.get(keys.QUEUE_REASON) for wait in waits]
    assert reasons == ["engine_lost", "slots", "engine_lost", None]
    assert [name for name, _ in tree.events] == ["penstock.replayed"] * 2


def test_a_residency_that_ended_in_its_prefill_has_its_batch() -> None:
    residency = Residency(num_chunks=2, num_steps=2, min_batch_size=7, max_batch_size=8)
    segments = (Segment(SegmentKind.PREFILL, 100.0, 102.0, residency=residency),)
    assert child(tree_of(request_record(segments=segments)), "prefill").attributes == {
        keys.PREFILL_CACHED: 0,
        keys.PREFILL_CHUNKS: 2,
        keys.BATCH_MIN: 7,
        keys.BATCH_MAX: 8,
    }


def test_what_happened_to_its_reader_is_reported() -> None:
    tree = tree_of(request_record(num_stalls=2, stalled_s=1.5, options=RequestOptions(priority=4)))
    assert tree.attributes[keys.STALLS] == 2
    assert tree.attributes[keys.STALLED] == 1.5
    assert tree.attributes[keys.PRIORITY] == 4


def test_several_outputs_and_a_chat() -> None:
    options = RequestOptions(is_chat=True, is_stream=False, num_outputs=2)
    record = request_record(options=options, finish_reasons=("STOP", "TIME_LIMIT"))
    tree = tree_of(record)
    assert start_attributes(record)[keys.OPERATION] == "chat"
    assert tree.attributes[keys.REQUEST_CHOICES] == 2
    assert tree.attributes[keys.REQUEST_STREAM] is False
    assert tree.attributes[keys.RESPONSE_FINISH_REASONS] == ("stop", "time_limit")


def test_the_next_rpc_keys_exist_next_to_todays() -> None:
    assert keys.RPC_STATUS_NEXT not in tree_of(request_record()).attributes
    attributes = tree_of(request_record(), has_next_rpc_keys=True).attributes
    assert attributes[keys.RPC_STATUS_NEXT] == attributes[keys.RPC_STATUS] == "OK"


@pytest.mark.parametrize(
    ("peer", "address", "port"),
    [
        ("ipv4:10.0.0.7:443", "10.0.0.7", 443),
        ("ipv6:%5B::1%5D:50051", "::1", 50051),
        ("ipv6:[fe80::2]:1", "fe80::2", 1),
        ("unix:/run/penstock.sock", "/run/penstock.sock", None),
        ("unix:", None, None),
        ("", None, None),
        ("nonsense", None, None),
    ],
)
def test_the_peer_is_split_into_address_and_port(
    peer: str, address: str | None, port: int | None
) -> None:
    attributes = tree_of(request_record(peer=peer)).attributes
    assert attributes.get(keys.PEER_ADDRESS) == address
    assert attributes.get(keys.PEER_PORT) == port


def test_content_is_reported_only_if_captured_and_enabled() -> None:
    content = Content(prompt='say "hi"\n', outputs=("hi", "hé"))
    record = request_record(content=content, finish_reasons=("STOP", "LENGTH"))
    assert keys.INPUT_MESSAGES not in tree_of(record).attributes
    assert keys.INPUT_MESSAGES not in tree_of(request_record(), has_content=True).attributes
    attributes = tree_of(record, has_content=True).attributes
    assert json.loads(str(attributes[keys.INPUT_MESSAGES])) == [
        {"role": "user", "parts": [{"type": "text", "content": 'say "hi"\n'}]}
    ]
    assert json.loads(str(attributes[keys.OUTPUT_MESSAGES])) == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": text}],
            "finish_reason": reason,
        }
        for text, reason in (("hi", "stop"), ("hé", "length"))
    ]


def test_text_from_clients_is_truncated_and_reasons_are_names() -> None:
    long = "x" * 10_000
    record = request_record(
        model=long, tenant=long, request_id=long, reason="the prompt was: secret",
        finish_reasons=("secret words",), peer=f"unix:{long}",
    )  # fmt: skip
    attributes = {**start_attributes(record), **tree_of(record).attributes}
    for key in (keys.REQUEST_MODEL, keys.TENANT, keys.RESPONSE_ID, keys.PEER_ADDRESS):
        assert len(str(attributes[key])) == MAX_TEXT
    assert attributes[keys.ERROR_REASON] == "other"
    assert attributes[keys.RESPONSE_FINISH_REASONS] == ("other",)


def test_a_trace_without_end_is_bounded_and_keeps_both_its_ends() -> None:
    kinds = (SegmentKind.QUEUE, SegmentKind.DECODE)
    segments = tuple(
        Segment(kinds[number % 2], 100.0 + number, 101.0 + number) for number in range(400)
    )
    tree = tree_of(request_record(segments=segments, end_s=500.0))
    assert len(tree.children) == MAX_CHILDREN
    assert (tree.children[0].start_ns, tree.children[-1].end_ns) == (
        100 * SECOND_NS,
        500 * SECOND_NS,
    )
    ids = {tree.span_id, *(span.span_id for span in tree.children)}
    assert len(ids) == MAX_CHILDREN + 1
    assert 0 not in ids


def test_no_child_span_has_the_invalid_id_zero() -> None:
    root_id = -0x9E3779B97F4A7C15 % 2**64
    trace = trace_parent(span_id=root_id.to_bytes(8, "big"))
    ids = [span.span_id for span in tree_of(request_record(trace=trace)).children]
    assert 0 not in ids
    assert len(set(ids)) == len(ids)


def test_numbers_that_are_not_known_are_not_reported() -> None:
    record = request_record(ttft_s=math.nan, estimated_queue_s=math.nan)
    reported = set(tree_of(record).attributes)
    assert not reported & {keys.LATENCY_TTFT, keys.QUEUE_ESTIMATE}
