"""Runs a service without asyncio, for comparison: grpc.server with one thread per request.

It connects to the same engine over the same socket as Penstock's fronts (gRPC server processes).
Each handler submits its request and waits on a queue; one thread reads the engine's frames and
fills the queues. Supports only short requests and validates nothing. Roles of this program:

    engine SOCKET                scheduler and simulated executor, whose steps take no time
    front SOCKET PORT THREADS    gRPC server with this number of threads
"""

from __future__ import annotations

import itertools
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from engine_on_socket import MAX_NUM_WAITING, engine_loop, listening
from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.models import resolve_model
from penstock.executor.simulated.executor import SimulatedExecutor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import RequestSpec, SamplingParams
from penstock.server.ipc.frames import FrontHello, Submit, decode, encode
from penstock.server.ipc.wire import FrameBuffer
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import output_pb2
from usage import print_usage

_FRONT_ID = 1
_END = -1
_SERVICE = "penstock.v1.GenerationService"


def run_engine(path: str) -> None:
    """Run the engine, with its socket at `path`, until terminated."""
    config = ExecutorConfig(
        kind=ExecutorKind.SIMULATED,
        model_path=resolve_model("demo"),
        max_num_seqs=1024,
        num_blocks=16_384,
        pipeline_depth=2,
        simulated=SimulatedConfig(),
    )
    executor = SimulatedExecutor(config)
    scheduler = SchedulerConfig(max_num_batched_tokens=8192, max_num_waiting=MAX_NUM_WAITING)
    core = Engine(executor, scheduler, time.monotonic)
    with listening(core, executor, path) as connections:
        print("ready", flush=True)
        engine_loop(connections).run()


class EngineConnection:
    """A connection to the engine's socket, shared by many threads."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lock = threading.Lock()
        self._queues: dict[int, queue.SimpleQueue[int]] = {}
        self._numbers = itertools.count(1)
        self._send(encode(FrontHello(front_id=_FRONT_ID)))
        threading.Thread(target=self._read, daemon=True).start()

    def generate(self, prompt: list[int], num_tokens: int) -> queue.SimpleQueue[int]:
        """Submit a request; return the queue that receives its tokens and then `_END`."""
        key = (_FRONT_ID << 32) + next(self._numbers)
        spec = RequestSpec(
            key=key,
            request_id=str(key),
            prompt_ids=np.array(prompt, dtype=np.int32),
            max_tokens=num_tokens,
            sampling=SamplingParams(temperature=0.0),
            arrival_s=time.monotonic(),
        )
        tokens: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._queues[key] = tokens
        self._send(encode(Submit(specs=(spec,))))
        return tokens

    def _send(self, frame: bytes) -> None:
        with self._lock:
            self._socket.sendall(frame)

    def _read(self) -> None:
        frames = FrameBuffer()
        while data := self._socket.recv(1 << 18):
            for body in frames.feed(data):
                updates = decode(body)
                if isinstance(updates, StepEvents):
                    self._distribute(updates)

    def _distribute(self, updates: StepEvents) -> None:
        for key, token in zip(updates.keys.tolist(), updates.tokens.tolist(), strict=True):
            self._queues[key].put(token)
        for end in updates.ends:
            self._queues.pop(end.key).put(_END)


class Service:
    """Implements `Generate` with one message per token."""

    def __init__(self, link: EngineConnection, text: ModelText) -> None:
        self._link = link
        self._text = text

    def generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        del context
        prompt: list[int] = list(request.token_prompt.ids)
        tokens = self._link.generate(prompt, request.stopping.max_tokens)
        accepted = output_pb2.RequestAccepted(
            request_id="1", model="demo", num_prompt_tokens=len(prompt)
        )
        yield pb.GenerateResponse(accepted=accepted)
        sequence = 1
        while (token := tokens.get()) != _END:
            text = self._text.tokenizer.decode([token])
            yield pb.GenerateResponse(
                sequence=sequence, tokens=output_pb2.TokenDelta(text=text, num_tokens=1)
            )
            sequence += 1
        yield pb.GenerateResponse(sequence=sequence, finished=output_pb2.RequestFinished())


def run_front(path: str, port: int, num_threads: int) -> None:
    text = ModelText.load(resolve_model("demo"), name="demo")
    server = grpc.server(ThreadPoolExecutor(max_workers=num_threads))
    service = Service(EngineConnection(path), text)
    handler = grpc.unary_stream_rpc_method_handler(
        service.generate,
        request_deserializer=pb.GenerateRequest.FromString,
        response_serializer=pb.GenerateResponse.SerializeToString,
    )
    methods = {"Generate": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    print("ready", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    print_usage(__doc__, num_arguments=2)
    if sys.argv[1] == "engine":
        run_engine(sys.argv[2])
    else:
        run_front(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
