"""Stream events become messages of the contract."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.events import WaitReason
from penstock.scheduler.request import FinishReason
from penstock.scheduler.state import RequestState
from penstock.server.front import events
from penstock.server.front.config import FrontConfig
from penstock.server.front.generation import ChunkLimits
from penstock.server.front.stream_head import MAX_PART_LOGPROBS, EchoedPrompt
from penstock.server.rpc.mapping_out import ResponseEncoder, encoder_for
from penstock.server.rpc.once_encoding import OnceEncoder
from penstock.v1 import state_pb2
from penstock.v1.generation_service_pb2 import GenerateOnceResponse, GenerateResponse

ACCEPTED = events.Accepted(request_id="r", model="m", num_prompt_tokens=3, seed=2**64 - 1)
FINISHED = events.Finished(
    outputs=(
        events.OutputEnd(
            output_index=0,
            reason=FinishReason.STOP,
            num_completion_tokens=2,
            stop_token_id=0,
        ),
        events.OutputEnd(
            output_index=1,
            reason=FinishReason.STOP,
            num_completion_tokens=0,
            stop_string="END",
        ),
    ),
    usage=events.Usage(num_prompt_tokens=3, num_completion_tokens=2, num_cached_prompt_tokens=1),
    timings=events.Timings(queue_s=0.5, prefill_s=0.25, decode_s=1.0, total_s=1.75, ttft_s=None),
    num_preemptions=4,
)


def encode(*batches: list[events.StreamEvent], hint: int = 1024) -> list[GenerateResponse]:
    encoder = ResponseEncoder(hint)
    return [
        GenerateResponse.FromString(data) for batch in batches for data in encoder.encode(batch)
    ]


def once(collected: list[events.StreamEvent]) -> GenerateOnceResponse:
    return GenerateOnceResponse.FromString(b"".join(once_parts(collected)))


def once_parts(collected: list[events.StreamEvent]) -> list[bytes]:
    encoder = OnceEncoder()
    for event in collected:
        for _ in encoder.add([event]):
            pass
    return list(encoder.parts())


def piece(text: str, index: int = 0, *records: events.TokenRecord) -> events.TokensPiece:
    return events.TokensPiece(index, text, 1, records)


def test_a_write_contains_all_events_since_the_last_one() -> None:
    messages = encode([ACCEPTED], [piece("a")], [piece("b"), piece("c"), piece("d"), FINISHED])
    assert [message.sequence for message in messages] == [0, 1, 2, 3]
    assert [message.WhichOneof("event") for message in messages] == [
        "accepted",
        "tokens",
        "tokens",
        "finished",
    ]
    assert [message.tokens.text for message in messages[1:3]] == ["a", "bcd"]
    assert messages[2].tokens.num_tokens == 3


def test_outputs_are_distinguished() -> None:
    messages = encode([piece("a", 0), piece("x", 1), piece("b", 0)])
    assert {(m.tokens.output_index, m.tokens.text) for m in messages} == {(0, "ab"), (1, "x")}


def test_all_fields_of_the_finished_event_are_set() -> None:
    (message,) = encode([FINISHED])
    end = message.finished
    assert [out.WhichOneof("matched_stop") for out in end.outputs] == [
        "stop_token_id",
        "stop_string",
    ]
    assert end.outputs[0].finish_reason == state_pb2.FINISH_REASON_STOP
    assert end.usage.num_cached_prompt_tokens == 1
    assert end.timings.queue_duration.ToMilliseconds() == 500
    assert end.timings.decode_duration.ToMilliseconds() == 1000
    assert end.timings.total_duration.ToMilliseconds() == 1750
    assert not end.timings.HasField("ttft_duration")
    assert end.num_preemptions == 4


def test_progress() -> None:
    (message,) = encode(
        [
            events.Progress(
                state=RequestState.PENDING,
                num_cached_prompt_tokens=5,
                num_preemptions=1,
                queue_s=0.25,
            )
        ]
    )
    assert message.progress.state == state_pb2.REQUEST_STATE_PENDING
    assert message.progress.queue_duration.ToMilliseconds() == 250
    assert message.progress.wait_reason == state_pb2.WAIT_REASON_UNSPECIFIED
    assert not message.progress.HasField("queue_position")
    assert not message.progress.HasField("estimated_queue_duration")


def test_a_place_in_the_queue_and_the_time_it_will_take() -> None:
    place = events.Progress(
        state=RequestState.PENDING,
        num_cached_prompt_tokens=0,
        num_preemptions=0,
        queue_s=0.0,
        queue_position=0,
        waits_for=WaitReason.SLOTS,
        estimated_queue_s=1.5,
    )
    accepted, progress = encode([structs.replace(ACCEPTED, estimated_queue_s=0.0), place])
    assert accepted.accepted.HasField("estimated_queue_duration")
    assert accepted.accepted.estimated_queue_duration.ToMilliseconds() == 0
    assert progress.progress.HasField("queue_position")
    assert progress.progress.wait_reason == state_pb2.WAIT_REASON_SLOTS
    assert progress.progress.estimated_queue_duration.ToMilliseconds() == 1500


def test_an_unknown_time_is_not_reported() -> None:
    unknown, endless = encode([ACCEPTED, structs.replace(ACCEPTED, estimated_queue_s=math.inf)])
    assert not unknown.accepted.HasField("estimated_queue_duration")
    assert not endless.accepted.HasField("estimated_queue_duration")


def test_records_carry_logprobs_only_when_known() -> None:
    top = (events.TopToken(9, -0.5), events.TopToken(8, -1.5))
    (message,) = encode(
        [piece("a", 0, events.TokenRecord(1)), piece("b", 0, events.TokenRecord(0, 0.0, 1, top))]
    )
    first, second = message.tokens.records
    assert (first.id, first.HasField("logprob"), first.HasField("rank")) == (1, False, False)
    assert (second.id, second.HasField("logprob"), second.rank) == (0, True, 1)
    assert [(t.id, t.logprob) for t in second.top_logprobs] == [(9, -0.5), (8, -1.5)]


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 2), st.text(max_size=8), st.integers(0, 20)), max_size=80
    ),
    cuts=st.sets(st.integers(0, 80), max_size=5),
)
def test_no_event_is_lost_or_repeated_and_no_message_too_large(
    pieces: list[tuple[int, str, int]], cuts: set[int]
) -> None:
    batches: list[list[events.StreamEvent]] = [[]]
    for position, (index, text, num_top) in enumerate(pieces):
        if position in cuts:
            batches.append([])
        top = tuple(events.TopToken(2**31, -1.0) for _ in range(num_top))
        record = events.TokenRecord(position, -0.5, 2**31 - 1, top)
        batches[-1].append(events.TokensPiece(index, text, 1, (record,)))
    messages = encode(*batches)
    assert [m.sequence for m in messages] == list(range(len(messages)))
    for index in range(3):
        mine = [m.tokens for m in messages if m.tokens.output_index == index]
        wanted = [(position, text) for position, (i, text, _) in enumerate(pieces) if i == index]
        assert "".join(m.text for m in mine) == "".join(text for _, text in wanted)
        assert [r.id for m in mine for r in m.records] == [position for position, _ in wanted]
        assert sum(m.num_tokens for m in mine) == len(wanted)
    assert all(m.ByteSize() <= 1100 for m in messages)


def test_a_long_prompt_is_sent_in_parts() -> None:
    text = "é日" * 2000
    records = tuple(events.TokenRecord(i) for i in range(500))
    messages = encode([events.PromptPiece(text=text, records=records)])
    assert "".join(m.prompt.text for m in messages) == text
    assert [r.id for m in messages for r in m.prompt.records] == list(range(500))
    assert all(m.ByteSize() <= 1100 for m in messages)


@pytest.mark.parametrize("num", [0, 1, 51, 52, 10_000])
def test_records_of_ids_without_logprobs_equal_single_records(num: int) -> None:
    edges = [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 2**31 - 1]
    ids = [*edges, *range(num)][:num]
    pieces = list(EchoedPrompt(np.array(ids, dtype=np.int32), "text").head())
    records = [piece.records for piece in pieces[1:]]
    assert all(isinstance(some, events.IdRecords) for some in records), "none is made yet"
    plain: list[events.StreamEvent] = [events.PromptPiece(text="text")]
    plain += [events.PromptPiece(records=tuple(some)) for some in records]
    assert encode(list(pieces)) == encode(plain)
    assert once(list(pieces)) == once(plain)
    assert [record.token_id for some in records for record in some] == ids


def test_a_response_with_long_records_is_encoded_in_parts() -> None:
    tops = tuple(events.TopToken(i, -float(i)) for i in range(20))
    collected: list[events.StreamEvent] = [ACCEPTED, events.PromptPiece(text="pro")]
    collected += [
        events.PromptPiece(text="mpt"),
        events.PromptPiece(records=tuple(events.TokenRecord(i, -1.0, 1, tops) for i in range(999))),
    ]
    collected += [piece("x", 0, events.TokenRecord(i, -2.0, 1, tops)) for i in range(999)]
    parts = once_parts([*collected, FINISHED])
    assert len(parts) > 8
    assert max(map(len, parts)) < 64 * 20 * 20
    response = GenerateOnceResponse.FromString(b"".join(parts))
    assert response.accepted.num_prompt_tokens == 3
    assert response.prompt.text == "prompt"
    assert [record.id for record in response.prompt.records] == list(range(999))
    first, second = response.outputs
    assert (first.output_index, first.text, first.num_tokens) == (0, "x" * 999, 999)
    assert [record.id for record in first.records] == list(range(999))
    assert (
        len(first.records[998].top_logprobs) == len(response.prompt.records[0].top_logprobs) == 20
    )
    assert (second.output_index, second.text, second.num_tokens) == (1, "", 0)
    assert response.finished.num_preemptions == 4


def test_the_once_encoder_keeps_no_object_for_each_token() -> None:
    """Each run of the garbage collector would visit the objects of all tokens."""
    encoder = OnceEncoder()
    tops = tuple(events.TopToken(i, -float(i)) for i in range(20))
    gc.collect()
    num_before = len(gc.get_objects())
    for token in range(2000):
        for _ in encoder.add([piece("x", 0, events.TokenRecord(token, -1.0, 1, tops))]):
            pass
    assert len(gc.get_objects()) - num_before < 100


def test_rows_of_a_prompt_come_in_parts_and_once() -> None:
    ids = np.arange(1000, dtype=np.int32)
    echo = EchoedPrompt(ids, num_logprobs=1)
    assert [len(piece.records) for piece in echo.head()] == [1]

    def rows(first: int, end: int) -> list[events.TokenRecord]:
        num = end - first
        logprobs = TokenLogprobs(
            chosen=-np.arange(first, end, dtype=np.float32),
            ranks=np.ones(num, dtype=np.int32),
            top_ids=np.arange(first, end, dtype=np.int32)[:, None],
            top_logprobs=np.zeros((num, 1), dtype=np.float32),
        )
        pieces = list(echo.rows(first, logprobs))
        assert all(2 * len(piece.records) <= MAX_PART_LOGPROBS for piece in pieces)
        return [record for piece in pieces for record in piece.records]

    reported = [*rows(1, 700), *rows(300, 800), *rows(800, 1001)]
    assert [record.token_id for record in reported] == list(range(1, 1000))
    assert [record.logprob for record in reported] == [-float(i) for i in range(1, 1000)]
    assert all(record.top[0].token_id == record.token_id for record in reported)
    assert echo.is_delivered


def test_a_complete_response_is_one_message() -> None:
    response = once([ACCEPTED, events.PromptPiece(text="p"), piece("a"), piece("b"), FINISHED])
    assert response.accepted.seed == 2**64 - 1
    assert response.prompt.text == "p"
    assert [(o.output_index, o.text) for o in response.outputs] == [(0, "ab"), (1, "")]
    assert len(response.finished.outputs) == 2


@pytest.mark.parametrize("reason", list(FinishReason))
def test_finish_reasons_are_those_of_the_contract(reason: FinishReason) -> None:
    assert state_pb2.FinishReason.Name(state_pb2.FinishReason.ValueType(reason.value)) == (
        f"FINISH_REASON_{reason.name}"
    )


@pytest.mark.parametrize("state", list(RequestState))
def test_states_are_those_of_the_contract(state: RequestState) -> None:
    assert state_pb2.RequestState.Name(state_pb2.RequestState.ValueType(state.value)) == (
        f"REQUEST_STATE_{state.name}"
    )


@pytest.mark.parametrize(("min_tokens", "num_messages"), [(1, 4), (200, 1)])
def test_a_message_with_a_minimum_size_is_not_split_again(
    min_tokens: int, num_messages: int
) -> None:
    encoder = encoder_for(ChunkLimits(min_tokens=min_tokens), FrontConfig())
    batch: list[events.StreamEvent] = [piece("word ") for _ in range(200)]
    assert len(list(encoder.encode(batch))) == num_messages
