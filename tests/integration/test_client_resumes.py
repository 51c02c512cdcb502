"""Both clients on connections that are cut: streams resume automatically or from a resume point."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.client import (
    Accepted,
    Client,
    Event,
    Finished,
    PenstockError,
    RequestNotFound,
    ResumePoint,
    RetryPolicy,
    SequenceUnavailable,
    SyncClient,
    TokenPrompt,
    Tokens,
    Unavailable,
)
from penstock.client.stream_reader import StreamReader
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.cut_relay import CutRelay, cut_relay
from support.resumed import resumable
from support.stepped_service import SteppedService, another_front, stepped

PROMPT = TokenPrompt(ids=(5, 6, 7, 8))
OPTIONS: dict[str, Any] = {
    "max_tokens": 200,  # far more bytes than `cut_after`, however few messages carry them
    "temperature": 0.0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture
async def service(text: ModelText) -> AsyncIterator[SteppedService]:
    """Provide a service that runs a step in each iteration of the event loop."""
    async with stepped(text) as service:
        running = asyncio.create_task(run(service))
        yield service
        running.cancel()


@pytest.fixture
async def relay(service: SteppedService) -> AsyncIterator[CutRelay]:
    async with cut_relay(service.address) as relay:
        yield relay


async def run(service: SteppedService) -> None:
    while True:
        service.step()
        await asyncio.sleep(0)


async def events_of(kind: type, address: str, **options: Any) -> list[Event]:
    """Return all events of one generation by the client class `kind`. `options`: its arguments."""
    if kind is Client:
        async with Client(address, resume_timeout_s=30.0, **options) as client:
            return [event async for event in client.generate(PROMPT, **OPTIONS)]

    def read() -> list[Event]:
        with SyncClient(address, resume_timeout_s=30.0, **options) as client:
            return list(client.generate(PROMPT, **OPTIONS))

    return await asyncio.to_thread(read)


def reported(events: list[Event]) -> tuple[str, list[int], Any]:
    tokens = [event for event in events if isinstance(event, Tokens)]
    end = events[-1]
    assert isinstance(end, Finished)
    ids = [record.id for piece in tokens for record in piece.records]
    return "".join(piece.text for piece in tokens), ids, end.outputs


@pytest.mark.parametrize("kind", [Client, SyncClient])
@pytest.mark.parametrize("cut_after", [300, 1000])
@pytest.mark.parametrize("multiplex", [False, True])
async def test_a_stream_continues_over_new_connections(
    service: SteppedService, relay: CutRelay, kind: type, cut_after: int, multiplex: bool
) -> None:
    whole = await events_of(kind, service.address)
    relay.cut_after = cut_after

    events = await events_of(kind, relay.address, multiplex=multiplex)
    assert relay.num_cuts
    assert reported(events) == reported(whole)
    sequences = [event.sequence for event in events]
    assert sequences == list(range(len(events)))


async def test_a_finished_event_without_its_status_is_read_again(service: SteppedService) -> None:
    whole = await whole_stream(service)
    reader = StreamReader()
    for response in whole:
        reader.receive(response)
    point = reader.next_point()
    assert point.next_sequence == whole[-1].sequence
    async for resumed in service.stub.Resume(point.message()):
        reader.receive(resumed.response)
    assert reader.end().outputs[0].num_completion_tokens == 20


async def whole_stream(service: SteppedService) -> list[pb.GenerateResponse]:
    return [response async for response in service.stub.Generate(resumable(20))]


async def test_a_client_resumes_at_another_front(service: SteppedService, relay: CutRelay) -> None:
    whole = await events_of(Client, service.address)
    async with (
        another_front(service) as other,
        Client(relay.address, resume_timeout_s=30.0) as client,
    ):
        events: list[Event] = []
        async for event in client.generate(PROMPT, **OPTIONS):
            events.append(event)
            if len(events) == 8:
                relay.target = other.address
                await service.disconnect()
                relay.cut()
        assert reported(events) == reported(whole)
        assert sum(isinstance(event, Accepted) for event in events) == 1


async def test_another_process_continues_from_a_point(service: SteppedService) -> None:
    whole = await events_of(Client, service.address)
    point = ResumePoint(request_id="")
    events: list[Event] = []
    first = Client(service.address, resume_timeout_s=30.0)
    stream = first.generate(PROMPT, **OPTIONS)
    async for event in stream:
        events.append(event)
        point = point.after(event)
        if len(events) == 10:
            break
    assert point.next_sequence == 10
    assert point.received_token_counts == (
        sum(event.num_tokens for event in events if isinstance(event, Tokens)),
    )
    # A process that dies does not cancel: only its connection closes.
    for call in tuple(first._calls._open_calls):  # pyright: ignore[reportPrivateUsage]
        call.cancel()
    async with Client(service.address) as second:
        rest = [event async for event in second.resume(point)]
        assert reported([*events, *rest]) == reported(whole)
        again = [event async for event in second.resume(point)]
        assert reported([*events, *again]) == reported(whole)
        everything = [event async for event in second.resume(point.request_id)]
        assert reported(everything) == reported(whole)
        with pytest.raises(SequenceUnavailable):
            async for _ in second.resume(
                ResumePoint(
                    request_id=point.request_id, next_sequence=9, received_token_counts=(999,)
                )
            ):
                pass
        with pytest.raises(RequestNotFound):
            async for _ in second.resume("unknown"):
                pass
    await stream.aclose()
    await first.close()


@pytest.mark.parametrize("kind", [Client, SyncClient])
async def test_a_caller_that_stops_reading_cancels_the_request(
    service: SteppedService, kind: type
) -> None:
    options = {**OPTIONS, "max_tokens": 400}
    if kind is Client:
        async with Client(service.address, resume_timeout_s=30.0) as client:
            stream = client.generate(PROMPT, **options)
            async for event in stream:
                if isinstance(event, Tokens):
                    break
            await stream.aclose()
    else:

        def leave() -> None:
            with SyncClient(service.address, resume_timeout_s=30.0) as client:
                for event in client.generate(PROMPT, **options):
                    if isinstance(event, Tokens):
                        break

        await asyncio.to_thread(leave)
    await service.until(service.is_clean)


async def test_a_forgotten_request_ends_with_the_original_error(
    service: SteppedService, relay: CutRelay
) -> None:
    async def read() -> None:
        retry = RetryPolicy(max_attempts=1)
        async with Client(relay.address, resume_timeout_s=30.0, retry=retry) as client:
            async for event in client.generate(PROMPT, **OPTIONS):
                if event.sequence == 5:
                    forget_all(service)
                    relay.cut()

    with pytest.raises(PenstockError) as caught:
        await read()
    assert isinstance(caught.value, Unavailable)


def forget_all(service: SteppedService) -> None:
    """Drop all streams that the engine keeps, as after the end of their resume timeout."""
    service.read_commands()
    kept = service.link.dispatcher.kept
    for stream in tuple(kept._streams.values()):  # pyright: ignore[reportPrivateUsage]
        kept._drop(stream)  # pyright: ignore[reportPrivateUsage]
