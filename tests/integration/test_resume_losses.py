"""Requests that are resumed after an engine or a front was lost."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock.scheduler.events import StepEvents
from penstock.scheduler.state import RequestState
from penstock.server.front import attachments
from penstock.server.front.errors import ErrorReason, request_error
from penstock.server.front.live_request import LiveRequest
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import state_pb2
from support.core import FakeClock
from support.front_pair import front_pair
from support.fronts import rich_error
from support.resumed import (
    outputs_of,
    read_and_cancel,
    read_some,
    resumable,
    resume_after,
    resumed,
    unbroken,
)
from support.stepped_service import another_front, stepped


async def whole_of(text: ModelText, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with stepped(text) as service:
        return await service.end_of(service.stub.Generate(message))


async def test_resume_waits_for_an_engine(text: ModelText) -> None:
    whole = await whole_of(text, resumable(30))
    async with front_pair(text) as site:
        first, second = site.fronts
        reported = await read_and_cancel(first, first.stub.Generate(resumable(30)), 5)
        first.link.close()
        call = second.stub.Resume(resume_after(reported))
        await second.until(lambda: second.server.num_active_calls == 1)
        await site.replace_engine()
        rest: list[Any] = await second.end_of(call)
        assert outputs_of([*reported, *(r.response for r in rest)]) == outputs_of(whole)


async def test_a_resume_waits_no_longer_for_an_engine_than_requests_do(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachments, "_POLL_INTERVAL_S", 0.001)
    clock = FakeClock(100.0)
    async with stepped(text, clock=clock) as service:
        service.link.close()
        call = service.stub.Resume(resumed("r"))
        await service.until(lambda: service.server.num_active_calls == 1)
        clock.now_s += service.front.config.max_replay_wait_s
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.end_of(call)
        error = rich_error(caught.value)
        assert (error.info.reason, error.code) == ("ENGINE_DOWN", grpc.StatusCode.UNAVAILABLE)
        assert error.retry_s is not None


async def test_a_request_in_transfer_is_neither_lost_nor_duplicated(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = await whole_of(text, resumable(200))
    begun, may_proceed = asyncio.Event(), asyncio.Event()

    async def slowly(*args: Any, **options: Any) -> Any:
        begun.set()
        await may_proceed.wait()
        return await tokenize(*args, **options)

    async with front_pair(text) as site:
        first, second = site.fronts
        reported = await read_and_cancel(first, first.stub.Generate(resumable(200)), 5)
        tokenize = second.front.prompts.tokenize
        monkeypatch.setattr(second.front.prompts, "tokenize", slowly)
        taken = second.stub.Resume(resume_after(reported))
        await second.until(begun.is_set, steps=True)
        await site.replace_engine()
        back = first.stub.Resume(resume_after(reported))
        await first.until(lambda: first.server.num_active_calls == 1)
        await site.run_steps(20)
        assert first.server.num_live_requests == 0, "it is with the other"
        may_proceed.set()
        rest: list[Any] = await first.end_of(back)
        assert outputs_of([*reported, *(r.response for r in rest)]) == outputs_of(whole)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.end_of(taken)
        assert rich_error(caught.value).info.reason == "STREAM_SUPERSEDED"


async def test_results_are_passed_to_new_engines_until_their_resume_timeout(
    text: ModelText,
) -> None:
    async with front_pair(text) as site:
        first, second = site.fronts
        reported = await first.end_of(first.stub.Generate(resumable(30)))
        await site.replace_engine()
        assert len(first.front.results) == 1
        rest: list[Any] = await second.end_of(second.stub.Resume(resume_after(reported[:4])))
        assert outputs_of([*reported[:4], *(r.response for r in rest)]) == outputs_of(reported)
        await site.run_steps(3)
        assert (len(first.front.results), len(second.front.results)) == (0, 1)
        (kept,) = first.link.dispatcher.kept._streams.values()
        kept.expires_s = 0.0
        first.link.dispatcher.sweep()
        await second.until(lambda: not second.front.results, steps=True)
        assert first.link.dispatcher.kept.num_bytes == 0


async def test_concurrent_resumes_on_several_fronts_all_succeed(text: ModelText) -> None:
    async with stepped(text) as first, another_front(first) as second:
        reported = await read_and_cancel(first, first.stub.Generate(resumable(60)), 5)
        calls = [
            (service, service.stub.Resume(resume_after(reported)))
            for _ in range(6)
            for service in (first, second)
        ]
        results = await asyncio.gather(
            *(service.end_of(call) for service, call in calls), return_exceptions=True
        )
        wholes: list[Any] = [result for result in results if isinstance(result, list)]
        assert wholes
        for rest in wholes:
            assert unbroken([*reported, *(r.response for r in rest)])
        for result in results:
            if isinstance(result, grpc.aio.AioRpcError):
                assert rich_error(result).info.reason == "STREAM_SUPERSEDED"


async def test_a_stream_that_is_resumed_before_a_step_is_not_ended_as_taken_over(
    text: ModelText,
) -> None:
    async with stepped(text) as first, another_front(first) as second:
        reported = await read_and_cancel(first, first.stub.Generate(resumable(60)), 5)
        stream = first.link.dispatcher.kept.find("r")
        assert stream is not None

        def attached_to(front_id: int) -> bool:
            first.read_commands()
            return stream.front_id == front_id

        elsewhere = second.stub.Resume(resume_after(reported))
        await second.until(lambda: attached_to(2))
        back = first.stub.Resume(resume_after(reported))
        await first.until(lambda: attached_to(1))
        rest: list[Any] = await first.end_of(back)
        assert unbroken([*reported, *(r.response for r in rest)])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.end_of(elsewhere)
        assert rich_error(caught.value).info.reason == "STREAM_SUPERSEDED"


@pytest.mark.parametrize("is_ended", [False, True])
async def test_after_a_lost_front_a_stream_resumes_at_any_point(
    text: ModelText, is_ended: bool
) -> None:
    message = resumable(60)
    message.sampling.num_outputs, message.sampling.temperature, message.sampling.seed = 2, 1.0, 3
    whole = await whole_of(text, message)
    async with stepped(text) as first, another_front(first) as second:
        reported = await read_and_cancel(first, first.stub.Generate(message), 20)
        await first.disconnect()
        newest = second.stub.Resume(resume_after(reported, 2))
        if is_ended:
            await second.end_of(newest)
        else:
            await read_some(second, newest, 1)
        for num_had in (17, 9, 1, 0, 0):
            had = reported[:num_had]
            rest: list[Any] = await second.end_of(second.stub.Resume(resume_after(had, 2)))
            responses = [*had, *(r.response for r in rest)]
            assert unbroken(responses)
            assert outputs_of(responses) == outputs_of(whole)
        assert second.server.num_live_requests == 0
        first.step(2)
        assert first.is_clean()


@pytest.mark.parametrize("meanwhile", ["nothing", "engine dies", "cancelled", "taken back"])
async def test_restoring_a_long_history_does_not_block_other_requests(
    text: ModelText,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    meanwhile: str,
) -> None:
    monkeypatch.setattr(attachments, "_TOKENS_PER_ITERATION", 2)
    whole = await whole_of(text, resumable(200))
    async with front_pair(text) as site:
        first, second = site.fronts
        reported = await read_and_cancel(first, first.stub.Generate(resumable(200)), 5)
        first.step(60)
        sizes: list[int] = []
        apply_history = second.front.apply_history

        def watched(request: LiveRequest, events: StepEvents) -> None:
            sizes.append(len(events.tokens))
            apply_history(request, events)

        monkeypatch.setattr(second.front, "apply_history", watched)
        call = second.stub.Resume(resume_after(reported))
        await second.until(lambda: sum(sizes) > 20, steps=True)
        assert max(sizes) <= 2
        (request,) = second.front.attaching
        rest: list[Any] = []
        if meanwhile == "engine dies":
            await site.replace_engine()
            assert request in second.front.attaching
        elif meanwhile == "cancelled":
            await second.result_of(second.front.cancel("r"))
        elif meanwhile == "taken back":
            rest = await first.end_of(first.stub.Resume(resume_after(reported)))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await second.end_of(call)
            assert rich_error(caught.value).info.reason == "STREAM_SUPERSEDED"
        if meanwhile != "taken back":
            rest = await second.end_of(call)
        assert request.num_replays == (meanwhile == "engine dies"), "once, with all of it"
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        responses = [*reported, *(r.response for r in rest)]
        assert unbroken(responses)
        if meanwhile == "cancelled":
            ((_, ids, _),) = outputs_of(responses)
            assert (
                responses[-1].finished.outputs[0].finish_reason == state_pb2.FINISH_REASON_CANCELLED
            )
            assert ids == outputs_of(whole)[0][1][: len(ids)]
        else:
            assert outputs_of(responses) == outputs_of(whole)


@pytest.mark.parametrize("meanwhile", ["nothing", "engine dies", "prompt is rejected"])
async def test_a_cancel_during_tokenisation_for_a_resume_ends_the_request(
    text: ModelText, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    async with front_pair(text) as site:
        first, second = site.fronts
        reported = await read_and_cancel(first, first.stub.Generate(resumable(200)), 5)
        is_tokenising, may_proceed = asyncio.Event(), asyncio.Event()
        tokenize = second.front.prompts.tokenize

        async def slowly(*args: Any, **options: Any) -> Any:
            is_tokenising.set()
            await may_proceed.wait()
            if meanwhile == "prompt is rejected":
                raise request_error(ErrorReason.ENGINE_DOWN)
            return await tokenize(*args, **options)

        monkeypatch.setattr(second.front.prompts, "tokenize", slowly)
        call = second.stub.Resume(resume_after(reported))
        await second.until(is_tokenising.is_set, steps=True)
        if meanwhile != "prompt is rejected":
            cancelling = asyncio.ensure_future(second.front.cancel("r"))
            state = await second.result_of(cancelling)
            assert state is RequestState.PROCESSING
        if meanwhile == "nothing":
            second.step(2)
            assert second.is_clean(), "the engine knows it at once"
        elif meanwhile == "engine dies":
            await site.replace_engine()
        may_proceed.set()
        if meanwhile == "prompt is rejected":
            with pytest.raises(grpc.aio.AioRpcError):
                await second.end_of(call)
            second.read_commands()
            stream = second.link.dispatcher.kept.find("r")
            assert stream is not None
            assert not stream.is_read, "its resume timeout runs"
            await second.result_of(second.front.cancel("r"))
            return
        rest: list[Any] = await second.end_of(call)
        (end,) = rest[-1].response.finished.outputs
        assert end.finish_reason == state_pb2.FINISH_REASON_CANCELLED
        second.step(2)
        assert second.is_clean()


async def one_of_two_ends(text: ModelText) -> pb.GenerateRequest:
    """Return a request for two outputs with log probabilities, of which the second ends long before
    the first.
    """
    message = resumable(450)
    message.sampling.num_outputs, message.sampling.temperature, message.sampling.seed = 2, 1.0, 3
    message.output.logprobs = 1
    (longer, _, _), (shorter, _, _) = outputs_of(await whole_of(text, message))
    assert shorter[5:9] not in longer
    message.stopping.stop_strings.append(shorter[5:9])
    return message


async def test_a_reconnected_front_replays_a_request_in_the_engine_that_kept_it(
    text: ModelText,
) -> None:
    message = await one_of_two_ends(text)
    whole = await whole_of(text, message)
    async with front_pair(text) as site:
        first = site.fronts[0]
        call = first.stub.Generate(message)
        reported = await read_some(first, call, 40)
        await first.disconnect()
        await first.connect()
        rest = await first.end_of(call)
        assert outputs_of([*reported, *rest]) == outputs_of(whole)
        assert len(first.link.dispatcher.kept) == 0


async def test_a_request_that_cannot_be_resumed_does_not_run_unread(text: ModelText) -> None:
    message = await one_of_two_ends(text)
    async with front_pair(text) as site:
        first = site.fronts[0]
        await read_and_cancel(first, first.stub.Generate(message), 40)
        assert first.server.num_live_requests == 1
        await site.replace_engine()
        assert first.server.num_live_requests == 0
        assert first.link.dispatcher.num_live == 0


async def test_a_result_attached_while_its_engine_dies_is_kept_by_the_next(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachments, "_TOKENS_PER_ITERATION", 2)
    async with front_pair(text) as site:
        first, second = site.fronts
        whole = await first.end_of(first.stub.Generate(resumable(100)))
        call = second.stub.Resume(resumed("r"))
        await second.until(lambda: bool(second.front.attaching), steps=True)
        await site.replace_engine()
        assert second.front.attaching
        for _ in range(2):
            rest: list[Any] = await second.end_of(call)
            assert outputs_of([r.response for r in rest]) == outputs_of(whole)
            call = second.stub.Resume(resumed("r"))
        call.cancel()
