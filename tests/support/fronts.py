"""A front over an engine port that the test controls, also as a real gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import numpy as np
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from grpc_status import rpc_status

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.events import (
    Admitted,
    Completed,
    Failed,
    Preempted,
    Queued,
    StepEvents,
    WaitReason,
)
from penstock.scheduler.executor import ExecutorInfo, Feature
from penstock.scheduler.request import FailureReason, FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, RequestError
from penstock.server.ipc.frames import Attached, KeptRequest
from penstock.server.ipc.ports import (
    AttachListener,
    CacheListener,
    EnginePortListener,
    EngineUnavailable,
)
from penstock.server.rpc.server import FrontServer
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from penstock.v1 import model_service_pb2_grpc
from penstock.v1.model_service_pb2 import GetModelRequest
from support import tiny_tokenizers
from support.link import hello
from support.timeout import TEST_TIMEOUT_S

INFO = ExecutorInfo(
    name="scripted",
    vocab_size=600,
    block_size=16,
    num_blocks=64,
    max_seq_len=512,
    max_num_seqs=8,
    features=frozenset(Feature),
    adapters=("pirate", "poet"),
)


SMALL_WINDOW = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.use_local_subchannel_pool", 1),
)
"""Options of a channel with the protocol's small default window, which does not grow."""


def make_text(folder: Path) -> ModelText:
    """Write the files of a model "tiny" below `folder` (a byte-level tokenizer and a chat
    template); return the model's text layer.
    """
    return ModelText.load(tiny_tokenizers.write_model_folder(folder / "tiny"), name="tiny")


class ScriptedPort:
    """An engine port that reports what the test scripts, and records what the front sends."""

    def __init__(self) -> None:
        self.info = INFO
        self.listener: EnginePortListener | None = None
        self.is_up = False
        self.cancelled: list[tuple[tuple[int, ...], FinishReason]] = []
        # Whether it reports the ends of cancelled requests, as an engine does.
        self.is_answering = False
        self.known_elsewhere: dict[str, RequestState] = {}
        self.num_unsent_bytes = 0
        # Whether it reports an index of cached blocks, and its listeners by salt.
        self.publishes_cache = False
        self.cache_listeners: dict[bytes, CacheListener] = {}
        self._submitted: asyncio.Queue[tuple[RequestSpec, ...]] = asyncio.Queue()
        self._cancels: asyncio.Queue[tuple[tuple[int, ...], FinishReason]] = asyncio.Queue()
        self._steps = itertools.count(1)
        self._up = asyncio.Event()

    def submit(self, specs: tuple[RequestSpec, ...], kept: KeptRequest | None = None) -> None:
        del kept
        if not self.is_up:
            raise EngineUnavailable("down")
        if specs:
            self._submitted.put_nowait(specs)

    def cancel(self, keys: tuple[int, ...], reason: FinishReason) -> None:
        self.cancelled.append((keys, reason))
        self._cancels.put_nowait((keys, reason))
        if self.is_answering:
            ends = [finished(key, reason) for key in keys]
            asyncio.get_running_loop().call_soon(lambda: self.emit(ends=ends))

    async def cancel_by_id(self, request_id: str) -> RequestState | None:
        if not self.is_up:
            raise EngineUnavailable("down")
        return self.known_elsewhere.get(request_id)

    async def wait_up(self) -> None:
        await self._up.wait()

    async def attach_stream(self, name: str, on_attached: AttachListener) -> None:
        """Report the stream as attached, without a kept request."""
        del name
        on_attached(Attached(ticket=0, resume_spec=None))

    def detach(self, names: tuple[str, ...]) -> None:
        """Do nothing: the scripted engine keeps no streams."""

    def follow_cache(self, salt: bytes, listener: CacheListener) -> Callable[[], None]:
        self.cache_listeners[salt] = listener
        return lambda: self.cache_listeners.pop(salt, None) and None

    async def next_submission(self) -> tuple[RequestSpec, ...]:
        return await asyncio.wait_for(self._submitted.get(), TEST_TIMEOUT_S)

    async def next_key(self) -> int:
        """Wait for the next submission; return the key of its first output."""
        return (await self.next_submission())[0].key

    async def next_cancel(self) -> tuple[tuple[int, ...], FinishReason]:
        return await asyncio.wait_for(self._cancels.get(), TEST_TIMEOUT_S)

    def come_up(self, epoch: int = 1) -> None:
        assert self.listener is not None
        self.is_up = True
        self._up.set()
        limits = SchedulerConfig(max_num_waiting=8, max_num_waiting_tokens=4096)
        reported = hello(epoch, self.info, limits, publishes_cache=self.publishes_cache)
        self.listener.on_hello(reported)

    def go_down(self) -> None:
        assert self.listener is not None
        self.is_up = False
        self._up.clear()
        self.listener.on_lost()

    def emit(
        self,
        *,
        tokens: Iterable[tuple[int, int]] = (),
        changes: Sequence[Queued | Admitted | Preempted] = (),
        ends: Sequence[Completed | Failed] = (),
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: Sequence[tuple[int, int, TokenLogprobs]] = (),
        at_s: float | None = None,
    ) -> None:
        """Report one step's events to the front; `tokens`: (key, token id) of each."""
        pairs = list(tokens)
        assert self.listener is not None
        self.listener.on_events(
            StepEvents(
                step=next(self._steps),
                at_s=time.monotonic() if at_s is None else at_s,
                keys=np.array([key for key, _ in pairs], dtype=np.int64),
                tokens=np.array([token for _, token in pairs], dtype=np.int32),
                logprobs=logprobs,
                prompt_logprobs=tuple(prompt_logprobs),
                changes=tuple(changes),
                ends=tuple(ends),
            )
        )

    def admit(self, key: int, **counts: int) -> None:
        self.emit(changes=[admitted(key, **counts)])

    def send(self, key: int, ids: Iterable[int]) -> None:
        for token_id in ids:
            self.emit(tokens=[(key, token_id)])

    def finish(
        self, key: int, reason: FinishReason = FinishReason.LENGTH, stop_id: int = -1
    ) -> None:
        self.emit(ends=[finished(key, reason, stop_id)])

    def fail(self, key: int, reason: FailureReason, **fields: Any) -> None:
        self.emit(ends=[Failed(key=key, at_s=time.monotonic(), reason=reason, **fields)])


@contextlib.contextmanager
def rejected(reason: ErrorReason) -> Generator[pytest.ExceptionInfo[RequestError]]:
    with pytest.raises(RequestError) as caught:
        yield caught
    assert caught.value.reason is reason


def queued(
    key: int,
    num_ahead: int,
    queue_s: float | None = None,
    waits_for: WaitReason | None = None,
) -> Queued:
    reported: dict[str, Any] = {"estimated_queue_s": queue_s, "waits_for": waits_for}
    return Queued(key=key, at_s=time.monotonic(), num_ahead=num_ahead, **reported)


def admitted(key: int, **counts: int) -> Admitted:
    reported: Any = {"num_cached_tokens": 0, "num_preemptions": 0, **counts}
    return Admitted(key=key, at_s=time.monotonic(), **reported)


def finished(key: int, reason: FinishReason = FinishReason.LENGTH, stop_id: int = -1) -> Completed:
    return Completed(key=key, at_s=time.monotonic(), reason=reason, stop_id=stop_id)


def flat_logprobs(num_rows: int) -> TokenLogprobs:
    """Return log probabilities with the same three alternatives in every row."""
    return TokenLogprobs(
        chosen=np.full(num_rows, -0.5, dtype=np.float32),
        ranks=np.ones(num_rows, dtype=np.int32),
        top_ids=np.tile(np.array([5, 6, 7], dtype=np.int32), (num_rows, 1)),
        top_logprobs=np.tile(np.array([-0.5, -1.0, -2.0], dtype=np.float32), (num_rows, 1)),
    )


@dataclass
class ServedFront:
    """A running server, the port behind it and a channel to it."""

    server: FrontServer
    port: ScriptedPort
    address: str
    channel: grpc.aio.Channel

    @property
    def stub(self) -> pb_grpc.GenerationServiceAsyncStub:
        return pb_grpc.GenerationServiceStub(self.channel)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.server.front.text.tokenizer.encode(
            text, add_special_tokens=False
        ).tolist()
        return ids


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    options: Sequence[tuple[str, int]] = (),
) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=list(options))
    return grpc.aio.secure_channel(address, credentials, options=list(options))


@contextlib.asynccontextmanager
async def serving(
    text: ModelText,
    config: FrontConfig | None = None,
    *,
    is_up: bool = True,
    channel_options: Sequence[tuple[str, int]] = (),
    credentials: grpc.ChannelCredentials | None = None,
    **options: Any,
) -> AsyncGenerator[ServedFront]:
    """Start a front server on a TCP socket with a scripted engine, and open a channel to it. If
    `credentials` is None, the channel is insecure (plaintext). `options`: other arguments of
    FrontServer.
    """
    port = ScriptedPort()
    config = config or FrontConfig(acceptance_delay_s=0.0)
    server = FrontServer(text, config, port=port, random=lambda: 0.0, **options)
    port.listener = server
    if is_up:
        port.come_up()
    bound_port = await server.start("127.0.0.1:0")
    address = f"127.0.0.1:{bound_port}"
    try:
        async with open_channel(address, credentials, channel_options) as channel:
            yield ServedFront(server, port, address, channel)
    finally:
        await server.stop()


async def block_writer(served: ServedFront) -> int:
    """Send tokens until the writer of the next request blocks; return the request's key."""
    key = await served.port.next_key()
    served.port.admit(key)
    token_id = served.encode("a")[0]
    async with asyncio.timeout(TEST_TIMEOUT_S), open_channel(served.address) as channel:
        models = model_service_pb2_grpc.ModelServiceStub(channel)
        while True:
            served.port.send(key, [token_id] * 200)
            # During these calls, a writer that is not blocked writes the backlog.
            for _ in range(20):
                await models.GetModel(GetModelRequest())
                if served.server.front.num_backlog_tokens == 0:
                    break
            else:
                return key


@dataclass(frozen=True)
class RichError:
    """A failed call or request as a client sees it."""

    code: grpc.StatusCode
    message: str
    info: ErrorInfo
    fields: list[str]
    retry_s: float | None
    request_id: str
    pushback_ms: str | None = None


def rich_status(status: Any, **more: Any) -> RichError:
    """Convert a google.rpc.Status and its details. `more`: other fields of RichError."""
    info, bad, retry, request = ErrorInfo(), BadRequest(), RetryInfo(), RequestInfo()
    found = [
        kind
        for detail in status.details
        for kind in (info, bad, retry, request)
        if detail.Unpack(kind)
    ]
    return RichError(
        code=_CODES[status.code],
        message=status.message,
        info=info,
        fields=[violation.field for violation in bad.field_violations],
        retry_s=retry.retry_delay.ToMilliseconds() / 1000 if retry in found else None,
        request_id=request.request_id,
        **more,
    )


def rich_error(error: grpc.aio.AioRpcError) -> RichError:
    pushback_ms = dict(error.trailing_metadata()).get("grpc-retry-pushback-ms")
    return rich_status(rpc_status.from_call(cast(grpc.Call, error)), pushback_ms=pushback_ms)


_CODES = {code.value[0]: code for code in grpc.StatusCode}


async def collect(
    call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse],
) -> list[pb.GenerateResponse]:
    async with asyncio.timeout(TEST_TIMEOUT_S):
        return [response async for response in call]


def text_of(responses: Iterable[pb.GenerateResponse], output_index: int = 0) -> str:
    pieces = (response.tokens for response in responses)
    return "".join(piece.text for piece in pieces if piece.output_index == output_index)
