"""Requests on their way between fronts while an engine, a front or an answer is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock.server.front import adoption
from penstock.server.link import hand_over
from penstock.server.link.claims import ClaimPort
from penstock.server.link.resume_frames import Inheritance, Lack
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import make_text, rich_error
from support.mortal_fronts import mortal_fronts
from support.resumed import (
    Clock,
    another_front,
    lose,
    num_tokens_of,
    outputs_of,
    read_some,
    resumable,
    resumed,
    unbroken,
)
from support.stepped_service import SteppedService, stepped


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelText]:
    text = make_text(tmp_path_factory.mktemp("model"))
    yield text
    text.close()


class Deaf:
    """A front that does not answer while it is asked, as one that was stopped."""

    is_asked = False

    def give(self, name: str, answer: Callable[[Inheritance | Lack], None]) -> None:
        """Never."""
        self.is_asked = True

    def let_go(self, name: str) -> None:
        """Nothing to let go of."""


async def whole_of(text: ModelText, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with stepped(text) as service:
        return await service.end_of(service.stub.Generate(message))


async def refused(service: SteppedService, request: pb.ResumeRequest) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.end_of(service.stub.Resume(request))
    return rich_error(caught.value)


async def test_resume_waits_for_an_engine_to_ask(text: ModelText) -> None:
    whole = await whole_of(text, resumable(30))
    async with mortal_fronts(text) as site:
        first, second = site.fronts
        told = await lose(first, first.stub.Generate(resumable(30)), 5)
        first.memory.kill()
        call = second.stub.Resume(resumed("r", next_sequence=5))
        await second.until(lambda: second.server.num_active_calls == 1)
        await site.replace_engine()
        rest: list[Any] = await second.end_of(call)
        assert outputs_of([*told, *(r.response for r in rest)]) == outputs_of(whole)


async def test_it_waits_no_longer_than_requests_do(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "_LOOK_AGAIN_S", 0.001)
    clock = Clock()
    async with stepped(text, clock=clock) as service:
        service.memory.kill()
        call = service.stub.Resume(resumed("r"))
        await service.until(lambda: service.server.num_active_calls == 1)
        clock.now_s += service.front.config.max_replay_wait_s
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.end_of(call)
        error = rich_error(caught.value)
        assert (error.info.reason, error.code) == ("ENGINE_DOWN", grpc.StatusCode.UNAVAILABLE)
        assert error.retry_s is not None


async def test_a_request_in_hand_is_neither_missed_nor_doubled(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = await whole_of(text, resumable(200))
    begun, may_go_on = asyncio.Event(), asyncio.Event()

    async def slowly(*args: Any, **options: Any) -> Any:
        begun.set()
        await may_go_on.wait()
        return await tokenise(*args, **options)

    async with mortal_fronts(text) as site:
        first, second = site.fronts
        told = await lose(first, first.stub.Generate(resumable(200)), 5)
        tokenise = second.front.prompts.tokenise
        monkeypatch.setattr(second.front.prompts, "tokenise", slowly)
        taken = second.stub.Resume(resumed("r", next_sequence=5))
        await second.until(lambda: second.server.num_active_calls == 1)
        await second.until(begun.is_set, steps=True)
        await site.replace_engine()
        back = first.stub.Resume(resumed("r", next_sequence=5))
        await first.until(lambda: first.server.num_active_calls == 1)
        await site.turns(20)
        assert first.server.num_live_requests == 0, "it has a copy, and must not use it now"
        may_go_on.set()
        rest: list[Any] = await first.end_of(back)
        assert outputs_of([*told, *(r.response for r in rest)]) == outputs_of(whole)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.end_of(taken)
        assert rich_error(caught.value).info.reason == "STREAM_SUPERSEDED"


async def test_copies_go_once_it_is_certain(text: ModelText) -> None:
    async with mortal_fronts(text) as site:
        first, second = site.fronts
        await lose(first, first.stub.Generate(resumable(30)), 5)
        await second.end_of(second.stub.Resume(resumed("r", next_sequence=5)))
        await site.turns(3)
        assert len(first.front.resumptions.spares) == len(second.front.resumptions.spares) == 0
        assert first.front.resumptions.spares.num_bytes == 0


async def test_copies_that_nobody_comes_for_are_forgotten(text: ModelText) -> None:
    clock = Clock()
    async with stepped(text, clock=clock) as first, another_front(first) as second:
        await lose(first, first.stub.Generate(resumable(30, grace_s=5.0)), 5)
        call = second.stub.Resume(resumed("r", next_sequence=5))
        spares = first.front.resumptions.spares
        await first.until(lambda: bool(first.step()) and len(spares) == 1)
        first.memory.kill()
        clock.now_s += 5.0
        assert spares.get("r") is None
        first.front.resumptions.sweep(clock.now_s)
        assert (len(spares), spares.num_bytes) == (0, 0)
        call.cancel()


@pytest.mark.parametrize("name", ["unknown", "r"])
async def test_a_front_that_stands_still_holds_nobody_up(text: ModelText, name: str) -> None:
    clock = Clock()
    async with stepped(text, clock=clock) as first, another_front(first) as second:
        told = await lose(first, first.stub.Generate(resumable(30)), 5)
        port, deaf = first.front.port, Deaf()
        assert isinstance(port, ClaimPort)
        port.on_asked(deaf)
        call = second.stub.Resume(resumed(name, next_sequence=5))
        await second.until(lambda: deaf.is_asked, steps=True)
        clock.now_s += hand_over.MAX_WAIT_S
        first.memory.sweep()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.end_of(call)
        error = rich_error(caught.value)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert error.retry_s is not None
        rest: list[Any] = await first.end_of(first.stub.Resume(resumed("r", next_sequence=5)))
        assert unbroken([*told, *(r.response for r in rest)]), "it goes on where it is"


async def test_too_many_that_ask_are_told_to_come_again(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stepped(text) as first, another_front(first) as second:
        told = await lose(first, first.stub.Generate(resumable(30)), 5)
        monkeypatch.setattr(hand_over, "MAX_CLAIMS", 0)
        error = await refused(second, resumed("r", next_sequence=5))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.retry_s is not None
        monkeypatch.undo()
        rest: list[Any] = await second.end_of(second.stub.Resume(resumed("r", next_sequence=5)))
        assert unbroken([*told, *(r.response for r in rest)])


async def test_many_that_ask_on_several_fronts_all_find_it(text: ModelText) -> None:
    async with stepped(text) as first, another_front(first) as second:
        told = await lose(first, first.stub.Generate(resumable(60)), 5)
        calls = [
            (service, service.stub.Resume(resumed("r", next_sequence=5)))
            for _ in range(6)
            for service in (first, second)
        ]
        results = await asyncio.gather(
            *(service.end_of(call) for service, call in calls), return_exceptions=True
        )
        wholes: list[Any] = [result for result in results if isinstance(result, list)]
        assert wholes
        for rest in wholes:
            assert unbroken([*told, *(r.response for r in rest)])
        for result in results:
            if isinstance(result, grpc.aio.AioRpcError):
                assert rich_error(result).info.reason == "STREAM_SUPERSEDED"


@pytest.mark.parametrize("is_ended", [False, True])
async def test_after_a_lost_front_every_point_is_to_be_had(text: ModelText, is_ended: bool) -> None:
    message = resumable(60)
    message.sampling.num_outputs, message.sampling.temperature, message.sampling.seed = 2, 1.0, 3
    whole = await whole_of(text, message)
    async with stepped(text) as first, another_front(first) as second:
        told = await lose(first, first.stub.Generate(message), 20)
        first.memory.hang_up(1)
        counts = num_tokens_of(told, 2)
        newest = second.stub.Resume(resumed("r", next_sequence=20, num_received=counts))
        if is_ended:
            await second.end_of(newest)
        else:
            await read_some(second, newest, 6)
        for num_had in (17, 9, 1, 0, 0):
            had = told[:num_had]
            counts = num_tokens_of(had, 2) if had else []
            request = resumed("r", next_sequence=num_had, num_received=counts)
            rest: list[Any] = await second.end_of(second.stub.Resume(request))
            responses = [*had, *(r.response for r in rest)]
            assert unbroken(responses)
            assert outputs_of(responses) == outputs_of(whole)
        assert second.server.num_live_requests == 0
        first.step(2)
        assert first.is_clean()


async def test_an_older_point_whose_counts_do_not_fit_harms_nothing(text: ModelText) -> None:
    whole = await whole_of(text, resumable(30))
    async with stepped(text) as first, another_front(first) as second:
        told = await lose(first, first.stub.Generate(resumable(30)), 9)
        first.memory.hang_up(1)
        right = resumed("r", next_sequence=9, num_received=num_tokens_of(told))
        some: list[Any] = await read_some(second, second.stub.Resume(right), 2)
        error = await refused(second, resumed("r", next_sequence=4, num_received=[1000]))
        assert error.info.reason == "SEQUENCE_UNAVAILABLE"
        rest: list[Any] = await second.end_of(second.stub.Resume(resumed("r", next_sequence=11)))
        responses = [*told, *(r.response for r in some), *(r.response for r in rest)]
        assert outputs_of(responses) == outputs_of(whole)
