"""A service in one process: fronts on real sockets, a real engine on a thread behind a real link,
the simulated executor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import grpc.aio

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig, SimulatedPace
from penstock.executor.create import create_executor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.server.front.config import FrontConfig
from penstock.server.link.frames import EngineHello
from penstock.server.link.unix_port import UnixEnginePort
from penstock.server.observe.request_record import RequestRecorder
from penstock.server.rpc.server import FrontServer
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.link import EngineThread, listening, socket_path


@dataclass
class Service:
    """Fronts over one engine."""

    engine: EngineThread
    fronts: list[FrontServer]
    stubs: list[pb_grpc.GenerationServiceAsyncStub]
    channels: list[grpc.aio.Channel]


@contextlib.asynccontextmanager
async def service(
    text: ModelText,
    *,
    num_fronts: int = 1,
    max_num_waiting: int = 64,
    max_num_seqs: int = 8,
    pace: SimulatedPace = SimulatedPace.IMMEDIATE,
    recorder: RequestRecorder | None = None,
    max_replays: int = 4,
) -> AsyncGenerator[Service]:
    """`recorder`: of the first front; its requests are then traced."""
    scheduler_config = SchedulerConfig(max_num_waiting=max_num_waiting)
    executor = create_executor(
        ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            num_blocks=512,
            max_seq_len=1024,
            max_num_seqs=max_num_seqs,
            simulated=SimulatedConfig(vocab_size=text.files.vocab_size, pace=pace, is_strict=True),
        )
    )
    engine = Engine(executor, scheduler_config, time.monotonic)
    hello = EngineHello(
        epoch=1,
        model="tiny",
        executor=executor.info,
        max_num_waiting=scheduler_config.max_num_waiting,
        max_num_waiting_tokens=scheduler_config.max_num_waiting_tokens,
    )
    async with contextlib.AsyncExitStack() as stack:
        path = stack.enter_context(socket_path())
        thread = EngineThread(stack.enter_context(listening(path)), engine, greeting=hello)
        stack.callback(thread.close)
        result = Service(thread, [], [], [])
        for front_id in range(1, num_fronts + 1):
            port = UnixEnginePort(path, front_id)
            server = FrontServer(
                text,
                FrontConfig(front_id=front_id, max_replays=max_replays),
                port=port,
                recorder=recorder if front_id == 1 else None,
                is_tracing=recorder is not None,
            )
            bound = await server.start("127.0.0.1:0")
            stack.push_async_callback(server.stop)
            await port.start(server)
            stack.push_async_callback(port.close)
            await port.wait_up()
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{bound}")
            await stack.enter_async_context(channel)
            result.fronts.append(server)
            result.channels.append(channel)
            result.stubs.append(pb_grpc.GenerationServiceStub(channel))
        yield result


def request(
    text: str = "hello", *, max_tokens: int = 20, request_id: str | None = None, seed: int = 1
) -> pb.GenerateRequest:
    message = pb.GenerateRequest(request_id=request_id)
    message.text_prompt.text = text
    message.stopping.max_tokens = max_tokens
    message.sampling.seed = seed
    return message
