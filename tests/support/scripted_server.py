"""A real gRPC server on a free port whose behaviour a test scripts, request by request.

A script, a coroutine function, answers one Generate call or one request of a Multiplex call.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import penstock.v1 as pb
from google.rpc import error_details_pb2, status_pb2
from penstock.server.rpc.mapping_out import duration_of

Trailers = tuple[tuple[str, str], ...]


def error_info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain="penstock.dev", metadata=metadata)


def retry_info(delay_s: float) -> error_details_pb2.RetryInfo:
    return error_details_pb2.RetryInfo(retry_delay=duration_of(delay_s))


def status_of(code: grpc.StatusCode, message: str, *details: Message) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def status_trailer(code: grpc.StatusCode, message: str, *details: Message) -> tuple[str, bytes]:
    status = status_of(code, message, *details)
    return ("grpc-status-details-bin", status.SerializeToString())


class ServedCall:
    """One call of Generate as the server sees it, with methods to answer it."""

    def __init__(self, request: pb.GenerateRequest, context: Any, key: int = 1) -> None:
        self.request = request
        self.key = key
        self.metadata = dict(context.invocation_metadata() or ())
        self.peer: str = context.peer()
        self.time_remaining_s: float | None = context.time_remaining()
        self.cancelled = asyncio.Event()
        self.next_sequence = 0
        self._context = context

    async def send(self, **event: Any) -> None:
        response = pb.GenerateResponse(sequence=self.next_sequence, **event)
        self.next_sequence += 1
        await self._write(response)

    async def accepted(self, request_id: str = "") -> None:
        event = pb.RequestAccepted(
            request_id=request_id or self.request.request_id or f"r-{self.key}",
            model="demo",
            num_prompt_tokens=3,
            seed=2**63 + 5,
        )
        await self.send(accepted=event)

    async def progress(self, state: pb.RequestState.ValueType) -> None:
        await self.send(progress=pb.RequestProgress(state=state, queue_duration=duration_of(0.002)))

    async def tokens(self, text: str, output_index: int = 0, num_tokens: int = 1) -> None:
        event = pb.TokenDelta(output_index=output_index, text=text, num_tokens=num_tokens)
        await self.send(tokens=event)

    async def finished(self, *num_tokens: int) -> None:
        await self.send(finished=finished_message(*(num_tokens or (2,))))

    async def fail(
        self, code: grpc.StatusCode, message: str, *details: Message, trailers: Trailers = ()
    ) -> None:
        metadata = (status_trailer(code, message, *details), *trailers)
        await self._context.abort(code, message, metadata)

    async def _write(self, response: pb.GenerateResponse) -> None:
        await self._context.write(response)


class ServedMultiplex:
    def __init__(self, context: Any) -> None:
        self.context = context
        self.peer: str = context.peer()
        self.requests: dict[int, ServedRequest] = {}
        self.is_half_closed = asyncio.Event()
        self.has_ended = asyncio.Event()
        self._writing = asyncio.Lock()

    async def send(self, event: pb.MultiplexEvent) -> None:
        async with self._writing:
            await self.context.write(pb.MultiplexResponse(events=[event]))


class ServedRequest(ServedCall):
    def __init__(self, call: ServedMultiplex, submit: pb.MultiplexSubmit) -> None:
        super().__init__(submit.generation, call.context, submit.key)
        self.call = call
        self.submit = submit
        self.num_credit_tokens = submit.num_credit_tokens
        self._credited = asyncio.Condition()

    async def fail(
        self, code: grpc.StatusCode, message: str, *details: Message, trailers: Trailers = ()
    ) -> None:
        assert not trailers, "an event has none"
        error = status_of(code, message, *details)
        await self.call.send(pb.MultiplexEvent(key=self.key, error=cast(Any, error)))

    async def spend(self, num_tokens: int) -> None:
        async with self._credited:
            await self._credited.wait_for(lambda: self.num_credit_tokens >= num_tokens)
            self.num_credit_tokens -= num_tokens

    async def add_credit(self, num_tokens: int) -> None:
        async with self._credited:
            self.num_credit_tokens += num_tokens
            self._credited.notify_all()

    async def _write(self, response: pb.GenerateResponse) -> None:
        await self.call.send(pb.MultiplexEvent(key=self.key, response=response))


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
            queue_duration=duration_of(0.002),
            prefill_duration=duration_of(0.01),
            ttft_duration=duration_of(0.0125),
            decode_duration=duration_of(0.5),
            total_duration=duration_of(0.6),
        ),
    )


Script = Callable[[Any], Awaitable[None]]
"""Answers a `ServedCall` or `ServedRequest`."""


async def send_hello(call: ServedCall) -> None:
    """Answer with two pieces of text and no error; a Generate call also gets progress events."""
    await call.accepted()
    if not isinstance(call, ServedRequest):
        await call.progress(pb.RequestState.REQUEST_STATE_PENDING)
        await call.progress(pb.RequestState.REQUEST_STATE_PROCESSING)
    await call.tokens("Hello, ")
    await call.tokens("world")
    await call.finished()


async def send_tokens_and_wait(call: ServedCall) -> None:
    """Send some output and wait for a cancel; then send the end that the contract defines."""
    await accept_and_send_tokens(call)
    await call.cancelled.wait()
    await call.finished()


accept: Script = ServedCall.accepted


async def accept_and_send_tokens(call: ServedCall) -> None:
    await call.accepted()
    await call.tokens("begun")


def failing(
    code: grpc.StatusCode,
    reason: str,
    *details: Any,
    trailers: Trailers = (),
    after: Script | None = None,
) -> Script:
    """Return a script that fails with `code`, after running the script `after`, if given. `reason`
    "": the error has no ErrorInfo.
    """

    async def script(call: ServedCall) -> None:
        if after is not None:
            await after(call)
        info = (error_info(reason),) if reason else ()
        await call.fail(code, "scripted", *info, *details, trailers=trailers)

    return script


if TYPE_CHECKING:
    # The type stubs require every method, and Generate as a generator; gRPC requires neither.
    _Servicer = object
else:

    class _Servicer(pb.GenerationServiceServicer, pb.ModelServiceServicer):
        """Answers UNIMPLEMENTED to methods that this server does not implement."""


class ScriptedServer(_Servicer):
    """Runs the scripts in order, one for each request, and `send_hello` after the last.

    `requests`: the calls of Generate and GenerateOnce and the requests of Multiplex, in order of
    arrival; `arrived`: the same without GenerateOnce. `once`: the responses or errors of
    GenerateOnce. `calls`: the Multiplex calls; each entry of `rejections` rejects one, and setting
    `cut` aborts an open one.
    """

    def __init__(self) -> None:
        self.scripts: deque[Script] = deque()
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()
        self.requests: list[Any] = []
        self.once: deque[pb.GenerateOnceResponse | tuple[grpc.StatusCode, str]] = deque()
        self.calls: list[ServedMultiplex] = []
        self.rejections: deque[tuple[grpc.StatusCode, str]] = deque()
        self.cut = asyncio.Event()
        self.cancelled_ids: list[str] = []
        self.health = health.aio.HealthServicer()
        self.address = ""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        call = ServedCall(request, context)
        try:
            await self._script_for(call)
        except asyncio.CancelledError:
            call.cancelled.set()
            raise

    async def Multiplex(self, requests: Any, context: Any) -> None:
        if self.rejections:
            await context.abort(*self.rejections.popleft())
        call = ServedMultiplex(context)
        self.calls.append(call)
        tasks: set[asyncio.Future[None]] = set()
        try:
            reading = asyncio.create_task(self._read(call, requests, tasks))
            cut = asyncio.create_task(self.cut.wait())
            await asyncio.wait({reading, cut}, return_when=asyncio.FIRST_COMPLETED)
            if self.cut.is_set():
                self.cut.clear()
                reading.cancel()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            cut.cancel()
            await reading
            call.is_half_closed.set()
            if tasks:
                await asyncio.wait(tasks)
        finally:
            call.has_ended.set()
            for task in tasks:
                task.cancel()

    async def _read(self, call: ServedMultiplex, commands: Any, tasks: set[Any]) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "submit":
                    request = ServedRequest(call, command.submit)
                    call.requests[request.key] = request
                    tasks.add(asyncio.ensure_future(self._script_for(request)))
                case "cancel":
                    call.requests[command.cancel.key].cancelled.set()
                case _:
                    credit = command.credit
                    await call.requests[credit.key].add_credit(credit.num_credit_tokens)

    def _script_for(self, call: ServedCall) -> Awaitable[None]:
        self.requests.append(call)
        self.arrived.put_nowait(call)
        script = self.scripts.popleft() if self.scripts else send_hello
        return script(call)

    async def GenerateOnce(
        self, request: pb.GenerateOnceRequest, context: Any
    ) -> pb.GenerateOnceResponse:
        self.requests.append(ServedCall(request.generation, context))
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
            reader_stall_timeout=duration_of(30),
            keepalive=pb.KeepalivePolicy(server_ping_interval=duration_of(20)),
        ),
        features=pb.ModelFeatures(logprobs=True, images=False),
        executor="simulated",
    )


async def arrived(server: ScriptedServer) -> Any:
    return await asyncio.wait_for(server.arrived.get(), 60)


async def until(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 60)


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
    for name in ("", "penstock.v1.GenerationService"):
        await servicer.health.set(name, health_pb2.HealthCheckResponse.SERVING)
    servicer.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(None)
