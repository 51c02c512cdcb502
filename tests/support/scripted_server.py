"""A real gRPC server on a free port with behaviour that a test scripts, call by call.

Contains the transport and the calls seen. A script answers each Generate: a coroutine.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import penstock.v1 as pb
from google.rpc import error_details_pb2, status_pb2


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def error_info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain="penstock.dev", metadata=metadata)


def retry_info(delay_s: float) -> error_details_pb2.RetryInfo:
    return error_details_pb2.RetryInfo(retry_delay=duration(delay_s))


def status_trailer(code: grpc.StatusCode, message: str, *details: Message) -> tuple[str, bytes]:
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return ("grpc-status-details-bin", status.SerializeToString())


class ServedCall:
    """One call of Generate as the server sees it, with methods to answer it."""

    def __init__(self, request: pb.GenerateRequest, context: Any) -> None:
        self.request = request
        self.metadata = dict(context.invocation_metadata() or ())
        self.peer: str = context.peer()
        self.time_remaining_s: float | None = context.time_remaining()
        self.cancelled = asyncio.Event()
        self.next_sequence = 0
        self._context = context

    async def send(self, response: pb.GenerateResponse) -> None:
        await self._context.write(response)

    async def _send_next(self, **event: Any) -> None:
        response = pb.GenerateResponse(sequence=self.next_sequence, **event)
        self.next_sequence += 1
        await self.send(response)

    async def accepted(self, request_id: str = "r-1") -> None:
        event = pb.RequestAccepted(
            request_id=request_id, model="demo", num_prompt_tokens=3, seed=2**63 + 5
        )
        await self._send_next(accepted=event)

    async def progress(self, state: pb.RequestState.ValueType) -> None:
        await self._send_next(
            progress=pb.RequestProgress(state=state, queue_duration=duration(0.002))
        )

    async def tokens(self, text: str, output_index: int = 0) -> None:
        event = pb.TokenDelta(output_index=output_index, text=text, num_tokens=1)
        await self._send_next(tokens=event)

    async def finished(self, *num_tokens: int) -> None:
        counts = num_tokens or (2,)
        await self._send_next(finished=finished_message(*counts))

    async def fail(
        self,
        code: grpc.StatusCode,
        message: str,
        *details: Message,
        trailers: tuple[tuple[str, str], ...] = (),
    ) -> NoReturn:
        metadata = (status_trailer(code, message, *details), *trailers)
        await self._context.abort(code, message, metadata)
        raise AssertionError

    async def wait_for_cancel(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError


def finished_message(*num_tokens: int) -> pb.RequestFinished:
    return pb.RequestFinished(
        outputs=[
            pb.OutputEnd(
                output_index=index,
                finish_reason=pb.FinishReason.FINISH_REASON_LENGTH,
                num_completion_tokens=count,
            )
            for index, count in enumerate(num_tokens)
        ],
        usage=pb.TokenUsage(
            num_prompt_tokens=3,
            num_completion_tokens=sum(num_tokens),
            num_cached_prompt_tokens=1,
        ),
        timings=pb.RequestTimings(
            queue_duration=duration(0.002),
            prefill_duration=duration(0.01),
            ttft_duration=duration(0.0125),
            decode_duration=duration(0.5),
            total_duration=duration(0.6),
        ),
    )


Script = Callable[[ServedCall], Awaitable[None]]


async def say_hello(call: ServedCall) -> None:
    """Answer without errors: two pieces of text and the states a request goes through."""
    await call.accepted()
    await call.progress(pb.RequestState.REQUEST_STATE_PENDING)
    await call.progress(pb.RequestState.REQUEST_STATE_PROCESSING)
    await call.tokens("Hello, ")
    await call.tokens("world")
    await call.finished()


async def speak_and_wait(call: ServedCall) -> None:
    """Send some output, then nothing until the call is cancelled."""
    await call.accepted()
    await call.tokens("begun")
    await call.wait_for_cancel()


if TYPE_CHECKING:
    # The stubs want every method, and Generate as a generator; gRPC wants neither.
    _Servicer = object
else:

    class _Servicer(pb.GenerationServiceServicer, pb.ModelServiceServicer):
        """Answers UNIMPLEMENTED to methods that this server does not implement."""


class ScriptedServer(_Servicer):
    """Runs the scripts in order, one for each Generate, and `say_hello` after the last."""

    def __init__(self) -> None:
        self.scripts: deque[Script] = deque()
        self.calls: asyncio.Queue[ServedCall] = asyncio.Queue()
        self.seen: list[ServedCall] = []
        self.once: deque[pb.GenerateOnceResponse | tuple[grpc.StatusCode, str]] = deque()
        self.cancelled_ids: list[str] = []
        self.health = health.aio.HealthServicer()
        self.address = ""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        call = ServedCall(request, context)
        self.seen.append(call)
        self.calls.put_nowait(call)
        script = self.scripts.popleft() if self.scripts else say_hello
        try:
            await script(call)
        except asyncio.CancelledError:
            call.cancelled.set()
            raise

    async def GenerateOnce(
        self, request: pb.GenerateOnceRequest, context: Any
    ) -> pb.GenerateOnceResponse:
        self.seen.append(ServedCall(request.generation, context))
        answer = self.once.popleft()
        if isinstance(answer, tuple):
            await context.abort(*answer)
        assert isinstance(answer, pb.GenerateOnceResponse)
        return answer

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        self.cancelled_ids.append(request.request_id)
        return pb.CancelResponse(state=pb.RequestState.REQUEST_STATE_PROCESSING)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        if request.page_token:
            return pb.ListModelsResponse(models=[pb.ModelInfo(name="second", executor="torch")])
        return pb.ListModelsResponse(models=[demo_model()], next_page_token="more")

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        if request.HasField("name") and request.name != "demo":
            code, message = grpc.StatusCode.NOT_FOUND, "no such model"
            details = status_trailer(code, message, error_info("MODEL_NOT_FOUND", model="x"))
            await context.abort(code, message, (details,))
        return pb.GetModelResponse(model=demo_model())

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        if request.HasField("chat_prompt"):
            rendered = "".join(
                part.text for turn in request.chat_prompt.messages for part in turn.parts
            )
            return pb.TokenizeResponse(token_ids=[9], rendered_text=rendered)
        return pb.TokenizeResponse(token_ids=[ord(char) for char in request.text_prompt.text])

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))


def demo_model() -> pb.ModelInfo:
    return pb.ModelInfo(
        name="demo",
        aliases=["small"],
        is_default=True,
        state=pb.ModelState.MODEL_STATE_READY,
        limits=pb.ModelLimits(
            max_total_tokens=512,
            vocab_size=2048,
            reader_stall_timeout=duration(30),
            keepalive=pb.KeepalivePolicy(server_ping_interval=duration(20)),
        ),
        features=pb.ModelFeatures(logprobs=True, images=False),
        executor="simulated",
    )


@asynccontextmanager
async def scripted_server(
    port: int = 0, options: tuple[tuple[str, int], ...] = ()
) -> AsyncGenerator[ScriptedServer, None]:
    """Serve on 127.0.0.1 during the block. `options`: gRPC channel arguments."""
    servicer = ScriptedServer()
    server = grpc.aio.server(options=options)
    pb.add_GenerationServiceServicer_to_server(cast(Any, servicer), server)
    pb.add_ModelServiceServicer_to_server(cast(Any, servicer), server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    await servicer.health.set("", health_pb2.HealthCheckResponse.SERVING)
    servicer.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(None)
