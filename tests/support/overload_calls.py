"""Calls that fill a service whose steps the test controls."""

import asyncio
from typing import Any, TypeAlias

import grpc.aio

from penstock.server.front.admission_estimate import AdmissionEstimate
from penstock.v1 import generation_service_pb2 as pb
from support.fronts import RichError, rich_error
from support.published_queue import PublishedQueue
from support.stepped_service import SteppedService, ids_of, request


def publish_queue(service: SteppedService) -> PublishedQueue:
    """Let the front read the engine's queue from a status board, as it does with an engine process;
    return the object that publishes the queue on the board.
    """
    shown = PublishedQueue(service.engine)
    service.front.admission = AdmissionEstimate(shown.view)
    return shown


Outcome: TypeAlias = "list[pb.GenerateResponse] | grpc.aio.AioRpcError"


class Calls:
    """Calls of Generate, each read by a task, and their outcomes."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Outcome]] = []

    def send(
        self, service: SteppedService, message: pb.GenerateRequest, tenant: str = ""
    ) -> asyncio.Task[Outcome]:
        metadata = (("x-tenant", tenant),) if tenant else ()
        call: Any = service.stub.Generate(message, metadata=metadata)
        task = asyncio.ensure_future(read_all(call))
        self.tasks.append(task)
        return task

    @property
    def done(self) -> list[asyncio.Task[Outcome]]:
        return [task for task in self.tasks if task.done()]

    @property
    def rejected(self) -> list[RichError]:
        return [rich_error(error) for error in self.errors]

    @property
    def errors(self) -> list[grpc.aio.AioRpcError]:
        ends = [task.result() for task in self.done]
        return [end for end in ends if isinstance(end, grpc.aio.AioRpcError)]

    @property
    def served(self) -> list[list[int]]:
        ends = [task.result() for task in self.done]
        return [ids_of(end) for end in ends if not isinstance(end, grpc.aio.AioRpcError)]


async def read_all(call: Any) -> Outcome:
    try:
        return [response async for response in call]
    except grpc.aio.AioRpcError as error:
        return error


async def fill_slots(service: SteppedService, calls: Calls, count: int, num_tokens: int) -> None:
    for _ in range(count):
        calls.send(service, request(num_tokens))
    await service.until_live(count)
    service.step()
    assert len(service.engine.running) == count
