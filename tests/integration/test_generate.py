"""Generate over a real socket, with an engine that the test controls."""

from __future__ import annotations

import asyncio
import time

import grpc

from penstock.scheduler.events import Preempted
from penstock.scheduler.request import FinishReason
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2
from support.fronts import ServedFront, admitted, collect, finished, flat_logprobs, text_of
from support.generate_requests import text_request
from support.timeout import TEST_TIMEOUT_S


async def test_a_stream_delivers_text_usage_and_one_end(served: ServedFront) -> None:
    call = served.stub.Generate(text_request("The quality", request_id="r-1"))
    (spec,) = await served.port.next_submission()
    ids = served.encode(" of mercy")
    served.port.admit(spec.key, num_cached_tokens=3)
    served.port.send(spec.key, ids)
    served.port.finish(spec.key, FinishReason.LENGTH)
    responses = await collect(call)

    assert [response.sequence for response in responses] == list(range(len(responses)))
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert kinds.count("accepted") == kinds.count("finished") == 1
    assert text_of(responses) == " of mercy"
    accepted, end = responses[0].accepted, responses[-1].finished
    assert accepted.request_id == "r-1"
    assert accepted.model == "tiny"
    assert accepted.num_prompt_tokens == spec.num_prompt_tokens
    assert accepted.seed == spec.sampling.seed
    progress = next(r.progress for r in responses if r.WhichOneof("event") == "progress")
    assert progress.state == state_pb2.REQUEST_STATE_PROCESSING
    assert progress.num_cached_prompt_tokens == 3
    assert end.usage.num_prompt_tokens == spec.num_prompt_tokens
    assert end.usage.num_completion_tokens == len(ids)
    assert end.usage.num_cached_prompt_tokens == 3
    assert end.outputs[0].finish_reason == state_pb2.FINISH_REASON_LENGTH
    assert end.timings.HasField("ttft_duration")
    assert await call.code() is grpc.StatusCode.OK
    assert served.server.num_live_requests == 0


async def test_stop_string_across_tokens_ends_the_stream_and_the_engine(
    served: ServedFront,
) -> None:
    message = text_request("hello")
    message.stopping.stop_strings.append("of mer")
    call = served.stub.Generate(message)
    (spec,) = await served.port.next_submission()
    ids = served.encode("The quality of mercy is not")
    assert len(ids) > 2
    served.port.admit(spec.key)
    served.port.send(spec.key, ids)
    responses = await collect(call)

    assert text_of(responses) == "The quality "
    (end,) = responses[-1].finished.outputs
    assert end.finish_reason == state_pb2.FINISH_REASON_STOP
    assert end.stop_string == "of mer"
    assert 0 < end.num_completion_tokens <= len(ids)
    num_reported = sum(r.tokens.num_tokens for r in responses)
    assert num_reported == end.num_completion_tokens
    assert await served.port.next_cancel() == ((spec.key,), FinishReason.STOP)
    served.port.finish(spec.key, FinishReason.STOP)  # arrives late and has no effect
    assert served.server.front.counters.num_late_events >= 1
    assert len(served.port.cancelled) == 1, "a finished request is not cancelled again"


async def test_a_client_stop_token_is_reported_and_end_of_sequence_is_not(
    served: ServedFront,
) -> None:
    eos = served.server.front.text.files.eos_ids[0]
    stop_id = served.encode("x")[0]
    for drawn, named in ((stop_id, True), (eos, False)):
        message = text_request("hello")
        message.stopping.stop_token_ids.append(stop_id)
        call = served.stub.Generate(message)
        (spec,) = await served.port.next_submission()
        assert set(spec.stop_ids) == {stop_id, eos}
        served.port.admit(spec.key)
        served.port.emit(
            tokens=[(spec.key, drawn)], ends=[finished(spec.key, FinishReason.STOP, drawn)]
        )
        (end,) = (await collect(call))[-1].finished.outputs
        assert end.finish_reason == state_pb2.FINISH_REASON_STOP
        assert end.HasField("matched_stop") is named
        assert end.num_completion_tokens == 1


async def test_prompt_logprobs_and_echo_come_before_the_tokens(served: ServedFront) -> None:
    message = text_request("The quality of mercy")
    message.output.echo = True
    message.output.prompt_logprobs = 1
    call = served.stub.Generate(message)
    (spec,) = await served.port.next_submission()
    assert spec.block_hashes == (), "every position must be computed"
    prompt_ids = spec.prompt_ids.tolist()
    rows = flat_logprobs(len(prompt_ids) - 1)
    served.port.admit(spec.key)
    served.port.emit(prompt_logprobs=[(spec.key, 1, rows)])
    served.port.emit(prompt_logprobs=[(spec.key, 1, rows)])  # recomputed after a preemption
    served.port.send(spec.key, served.encode("x"))
    served.port.finish(spec.key)
    responses = await collect(call)
    kinds = [response.WhichOneof("event") for response in responses]
    last_prompt = max(index for index, kind in enumerate(kinds) if kind == "prompt")
    assert last_prompt < kinds.index("tokens")
    prompts = [r.prompt for r in responses if r.WhichOneof("event") == "prompt"]
    assert "".join(prompt.text for prompt in prompts) == "The quality of mercy"
    records = [record for prompt in prompts for record in prompt.records]
    assert [record.id for record in records] == prompt_ids
    assert not records[0].HasField("logprob")
    assert all(record.HasField("logprob") for record in records[1:])
    assert len(records[1].top_logprobs) == 1


async def test_generate_once_returns_the_complete_response(served: ServedFront) -> None:
    message = pb.GenerateOnceRequest(generation=text_request("hello"))
    message.generation.sampling.num_outputs = 2
    call = asyncio.ensure_future(served.stub.GenerateOnce(message))
    first, second = await served.port.next_submission()
    served.port.emit(changes=[admitted(first.key), admitted(second.key)])
    served.port.send(second.key, served.encode("two"))
    served.port.send(first.key, served.encode("one"))
    served.port.emit(ends=[finished(first.key), finished(second.key)])
    response = await asyncio.wait_for(call, TEST_TIMEOUT_S)
    assert [tokens.text for tokens in response.outputs] == ["one", "two"]
    assert [tokens.output_index for tokens in response.outputs] == [0, 1]
    assert len(response.finished.outputs) == 2
    assert response.accepted.model == "tiny"


async def test_preemption_is_reported_as_progress(served: ServedFront) -> None:
    call = served.stub.Generate(text_request("hello"))
    (spec,) = await served.port.next_submission()
    ids = served.encode("abc def")
    served.port.admit(spec.key)
    served.port.send(spec.key, ids[:1])
    served.port.emit(changes=[Preempted(key=spec.key, at_s=time.monotonic())])
    served.port.admit(spec.key, num_cached_tokens=2, num_preemptions=1)
    served.port.send(spec.key, ids[1:])
    served.port.finish(spec.key)
    responses = await collect(call)
    states = [r.progress.state for r in responses if r.WhichOneof("event") == "progress"]
    assert states == [
        state_pb2.REQUEST_STATE_PROCESSING,
        state_pb2.REQUEST_STATE_PENDING,
        state_pb2.REQUEST_STATE_PROCESSING,
    ]
    assert responses[-1].finished.num_preemptions == 1
    assert responses[-1].finished.usage.num_cached_prompt_tokens == 0
    assert text_of(responses) == "abc def"


async def test_default_seed_differs_and_request_id_is_given(served: ServedFront) -> None:
    seeds, ids = set(), set()
    for _ in range(3):
        call = served.stub.Generate(text_request("hello"))
        (spec,) = await served.port.next_submission()
        served.port.finish(spec.key)
        accepted = (await collect(call))[0].accepted
        assert accepted.seed == spec.sampling.seed
        assert accepted.request_id == spec.request_id
        seeds.add(accepted.seed)
        ids.add(accepted.request_id)
    assert len(seeds) == len(ids) == 3
