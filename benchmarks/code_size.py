"""Reports the size of the code, and the number of files and functions that one request executes.

Reports lines and files of each folder's Python code, without generated code. Then traces one
request of 16 tokens through a front (a real gRPC server), the engine and the simulated executor in
one process. The engine runs one step for each message that the client has read, so that the path is
nearly the same in every run. Counts function calls (a resumed coroutine counts as another call),
and calls from a function in one file to a function in another.

    python benchmarks/code_size.py [--list] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import grpc.aio

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.create import create_executor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.server.front.config import FrontConfig
from penstock.server.ipc.frames import EngineHello
from penstock.server.observe.request_record import RequestRecorder
from penstock.server.rpc.server import FrontServer
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from report import Outcome, arguments, at_most, print_rows, print_table, run
from word_tokenizer import write_tokenizer

_ROOT = Path(__file__).resolve().parents[1]
_PARTS = ("server", "scheduler", "executors", "clients", "tools", "gateways", "tests", "benchmarks")
_TRACED = tuple(f"{_ROOT / part}/penstock/" for part in ("server", "scheduler", "executors"))
_VOCAB_SIZE = 512
_NUM_TOKENS = 16
_NUM_WARM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Size of the Python files of one folder of the repository."""

    name: str
    num_files: int
    num_lines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPath:
    """The code that one request executes. `num_crossings`: number of calls from one traced file to
    another. `files`: number of calls by file.
    """

    num_files: int
    num_functions: int
    num_calls: int
    num_crossings: int
    files: dict[str, int]


def count(name: str) -> Part:
    """Count files and lines of the folder `name` of the repository, without generated code."""
    paths = [path for path in (_ROOT / name).rglob("*.py") if "_pb2" not in path.name]
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in paths)
    return Part(name=name, num_files=len(paths), num_lines=lines)


class _Profile:
    """A context manager that counts the calls of functions in the traced folders."""

    def __init__(self) -> None:
        self.functions: Counter[tuple[str, int]] = Counter()
        self.num_crossings = 0

    def __enter__(self) -> _Profile:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def path(self) -> RequestPath:
        """Return what was counted. Raises RuntimeError if no traced function was called."""
        if not self.functions:
            raise RuntimeError(f"the installed penstock is not the one in {_ROOT}")
        files: Counter[str] = Counter()
        for (name, _), num in self.functions.items():
            files[name.removeprefix(f"{_ROOT}/")] += num
        return RequestPath(
            num_files=len(files),
            num_functions=len(self.functions),
            num_calls=files.total(),
            num_crossings=self.num_crossings,
            files=dict(files.most_common()),
        )

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(_TRACED):
            return
        name = frame.f_code.co_filename
        self.functions[name, frame.f_code.co_firstlineno] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(_TRACED):
            caller = caller.f_back
        self.num_crossings += caller is not None and caller.f_code.co_filename != name


async def trace() -> RequestPath:
    """Trace one request, after some warm-up requests; return the code that it executed."""
    sys.path.insert(0, str(_ROOT / "tests"))
    from support.link import EngineLink

    simulated = SimulatedConfig(vocab_size=_VOCAB_SIZE, is_real_time=False)
    config = ExecutorConfig(
        kind=ExecutorKind.SIMULATED, num_blocks=64, max_seq_len=1024, simulated=simulated
    )
    executor = create_executor(config)
    limits = SchedulerConfig()
    hello = EngineHello(
        epoch=1,
        model="words",
        executor=executor.info,
        max_num_waiting=limits.max_num_waiting,
        max_num_waiting_tokens=limits.max_num_waiting_tokens,
    )
    link = EngineLink(Engine(executor, limits, time.monotonic), hello)
    port = link.port(1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"vocab_size": _VOCAB_SIZE}))
        write_tokenizer(Path(folder), _VOCAB_SIZE)
        text = ModelText.load(Path(folder))
    recorder = RequestRecorder(lambda _: None)
    server = FrontServer(
        text, FrontConfig(front_id=1), port=port, recorder=recorder, is_tracing=True
    )
    bound = await server.start("127.0.0.1:0")
    await link.connect(port, server)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{bound}") as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            for _ in range(_NUM_WARM):
                await _generate(stub, link, server)
            with _Profile() as profile:
                await _generate(stub, link, server)
    finally:
        await server.stop()
        await port.close()
        link.close()
        text.close()
    return profile.path()


async def _generate(stub: Any, link: Any, server: FrontServer) -> None:
    """Run one request to its end; step the engine once for each message that the client
    has read."""
    request = pb.GenerateRequest()
    request.text_prompt.text = " ".join(f"w{number}" for number in range(3, 35))
    request.stopping.max_tokens = _NUM_TOKENS
    request.stopping.ignore_eos = True
    num_tokens = 0
    async for response in stub.Generate(request):
        num_tokens += response.tokens.num_tokens
        link.pump()
    if num_tokens != _NUM_TOKENS:
        raise RuntimeError(f"{num_tokens} tokens came instead of {_NUM_TOKENS}")
    # The last lines of the call run after the client has received the status.
    while server.num_active_calls:  # noqa: ASYNC110
        await asyncio.sleep(0)


def measure(options: Namespace) -> Outcome:
    """Count files and lines of all folders, and trace a request."""
    parts = {name: count(name) for name in _PARTS}
    print_rows("Python of the repository, generated code left out", list(parts.values()))
    path = asyncio.run(trace())
    if options.list:
        print_table("Calls of one request", ("file", "calls"), list(path.files.items()))
    columns = ("num_files", "num_functions", "num_calls", "num_crossings")
    print_rows(f"One request of {_NUM_TOKENS} tokens", [path], *columns)
    product = [part for name, part in parts.items() if name not in ("tests", "benchmarks")]
    goals = (
        ("server: lines", parts["server"].num_lines, 28_000, "lines"),
        ("server: files", parts["server"].num_files, 200, "files"),
        ("product: lines", sum(part.num_lines for part in product), 50_000, "lines"),
        ("product: files", sum(part.num_files for part in product), 350, "files"),
        ("tests: lines", parts["tests"].num_lines, 62_000, "lines"),
        ("request: files", path.num_files, 60, "files"),
        ("request: functions", path.num_functions, 350, "functions"),
        ("request: crossings", path.num_crossings, 1000, "calls"),
    )
    return {"parts": parts, "request": path}, [at_most(*goal) for goal in goals]


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--list", action="store_true", help="calls in each file of the request")
    run(parser, measure)
