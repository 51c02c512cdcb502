"""Stream events become a gateway's messages: new text in chunks, and a final message per output."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from penstock.gateway import smg
from penstock.gateway.smg.response_mapping import REASONS, ChunkEncoder, NonStreamingEncoder
from penstock.scheduler.request import FinishReason
from penstock.scheduler.state import RequestState
from penstock.server.front.events import (
    Accepted,
    Finished,
    OutputEnd,
    Progress,
    PromptPiece,
    StreamEvent,
    Timings,
    TokenRecord,
    TokensPiece,
    TopToken,
    Usage,
)

ACCEPTED = Accepted(request_id="r", model="tiny", num_prompt_tokens=40, seed=1)
TIMINGS = Timings(queue_s=0.0, prefill_s=0.0, decode_s=0.0, total_s=0.0, ttft_s=None)


def running(num_cached: int) -> Progress:
    return Progress(
        state=RequestState.PROCESSING,
        num_cached_prompt_tokens=num_cached,
        num_preemptions=0,
        queue_s=0.0,
    )


def piece(*ids: int, index: int = 0, logprob: float | None = None) -> TokensPiece:
    top = () if logprob is None else (TopToken(9, logprob - 1),)
    return TokensPiece(index, "x", len(ids), [TokenRecord(one, logprob, 1, top) for one in ids])


def finished(*ends: OutputEnd, num_cached: int = 16) -> Finished:
    num_tokens = sum(end.num_completion_tokens for end in ends)
    usage = Usage(
        num_prompt_tokens=40, num_completion_tokens=num_tokens, num_cached_prompt_tokens=num_cached
    )
    return Finished(outputs=ends, usage=usage, timings=TIMINGS, num_preemptions=0)


def end(num: int, index: int = 0, reason: FinishReason = FinishReason.LENGTH) -> OutputEnd:
    return OutputEnd(output_index=index, reason=reason, num_completion_tokens=num)


def messages(
    encoder: ChunkEncoder | NonStreamingEncoder, *batches: Sequence[StreamEvent]
) -> list[vllm.GenerateResponse]:
    return [
        vllm.GenerateResponse.FromString(data)
        for batch in batches
        for data in encoder.encode(batch)
    ]


def test_a_stream_in_chunks() -> None:
    encoder = ChunkEncoder()

    reported = messages(
        encoder, [ACCEPTED, running(16)], [piece(5)], [piece(6), piece(7)], [finished(end(3))]
    )

    chunks, (last,) = [one.chunk for one in reported[:-1]], reported[-1:]
    assert [list(chunk.token_ids) for chunk in chunks] == [[5], [6, 7]]
    assert [chunk.completion_tokens for chunk in chunks] == [1, 2]
    assert {chunk.prompt_tokens for chunk in chunks} == {40}
    assert {chunk.cached_tokens for chunk in chunks} == {16}
    assert last.complete.finish_reason == "length"
    assert list(last.complete.output_ids) == []
    assert last.complete.completion_tokens == 3
    assert last.complete.cached_tokens == 16
    assert encoder.usage is not None


def test_what_a_request_finds_again_after_a_preemption_is_not_a_hit() -> None:
    reported = messages(ChunkEncoder(), [ACCEPTED, running(16)], [running(32), piece(5)])

    assert [one.chunk.cached_tokens for one in reported] == [16]


def test_outputs_are_separate_and_each_has_a_final_message() -> None:
    reported = messages(
        ChunkEncoder(),
        [ACCEPTED, piece(5, index=1), piece(6), piece(7, index=1), finished(end(1), end(2, 1))],
    )

    by_index = {
        one.chunk.index: list(one.chunk.token_ids) for one in reported if one.HasField("chunk")
    }
    assert by_index == {0: [6], 1: [5, 7]}
    assert [one.complete.index for one in reported if one.HasField("complete")] == [0, 1]


def test_a_backlog_is_cut_into_messages_of_bounded_size() -> None:
    reported = messages(ChunkEncoder(), [ACCEPTED], [piece(*range(600))])

    assert [len(one.chunk.token_ids) for one in reported] == [256, 256, 88]


def test_a_complete_response_is_one_message() -> None:
    encoder = NonStreamingEncoder()
    assert messages(encoder, [ACCEPTED, running(0)], [piece(5), piece(8, index=1)]) == []

    reported = messages(encoder, [piece(6), finished(end(2), end(1, 1))])

    assert [list(one.complete.output_ids) for one in reported] == [[5, 6], [8]]
    assert [one.complete.completion_tokens for one in reported] == [2, 1]


@pytest.mark.parametrize("encoder_type", [ChunkEncoder, NonStreamingEncoder])
def test_logprobs_of_output_and_prompt(
    encoder_type: type[ChunkEncoder] | type[NonStreamingEncoder],
) -> None:
    prompt = PromptPiece(records=(TokenRecord(3), TokenRecord(4, -2.0, 1, (TopToken(4, -2.0),))))

    reported = messages(
        encoder_type(),
        [ACCEPTED, prompt],
        [piece(5, logprob=-0.5)],
        [piece(6, logprob=-1.5), finished(end(2))],
    )

    parts = [one.chunk if one.HasField("chunk") else one.complete for one in reported]
    values = [value for part in parts for value in part.output_logprobs.token_logprobs]
    assert values == [-0.5, -1.5]
    tops = [list(top.token_ids) for part in parts for top in part.output_logprobs.top_logprobs]
    assert tops == [[9], [9]]
    first, *others = [part for part in parts if part.HasField("input_logprobs")]
    assert others == []
    assert list(first.input_logprobs.token_ids) == [3, 4]
    assert not first.input_logprobs.token_logprobs[0].HasField("value")
    assert first.input_logprobs.token_logprobs[1].value == -2.0


def test_unrequested_logprobs_are_not_returned() -> None:
    (chunk, last) = messages(ChunkEncoder(), [ACCEPTED, piece(5), finished(end(1))])

    assert not chunk.chunk.HasField("output_logprobs")
    assert not last.complete.HasField("output_logprobs")


def test_the_stop_string_or_token_is_reported() -> None:
    by_text = OutputEnd(
        output_index=0, reason=FinishReason.STOP, num_completion_tokens=1, stop_string="."
    )
    by_token = OutputEnd(
        output_index=1, reason=FinishReason.STOP, num_completion_tokens=1, stop_token_id=7
    )
    reported = messages(NonStreamingEncoder(), [ACCEPTED, finished(by_text, by_token, end(1, 2))])

    assert [one.complete.WhichOneof("matched_stop") for one in reported] == [
        "matched_stop_str",
        "matched_token_id",
        None,
    ]
    assert reported[0].complete.matched_stop_str == "."
    assert reported[1].complete.matched_token_id == 7


def test_every_finish_reason_has_a_name() -> None:
    assert REASONS.keys() == set(FinishReason)


def test_metrics_know_the_method_that_brings_requests() -> None:
    (service,) = vllm.DESCRIPTOR.services_by_name.values()

    assert {f"{service.full_name}/Generate"} == set(smg.request_methods)
