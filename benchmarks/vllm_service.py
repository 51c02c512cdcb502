"""Starts vLLM's gRPC server on the CPU, so that `cpu_served.py` can compare it with Penstock.

Run as a program, this module is a client process for that server, started by `served_model.py`. It
needs vLLM's interpreter, in which the generated code of the server's protocol is installed:

    vllm_service.py ADDRESS STREAMS PROMPT_TOKENS OUTPUT_TOKENS VOCABULARY SEED START_AT
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Generator
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc

from usage import print_usage

CLIENT = __file__
"""The program of a client process."""
_START_LIMIT_S = 240.0
_TEMPERATURE = 1.0  # copied from served_model.py, which needs Penstock


class VllmService:
    """vLLM's server, stopped (SIGSTOP) except during its runs, because it uses the cores even when
    idle.
    """

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self._process = process
        self.address = address

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Resume the server, and stop it again when the `with` block ends."""
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGSTOP)


@contextlib.asynccontextmanager
async def vllm_service(
    python: str, model: Path, *, num_cores: int, max_num_seqs: int, max_length: int, budget: int
) -> AsyncGenerator[VllmService]:
    """Start a server for `model` on the first `num_cores` cores; `budget`: tokens per step."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_cores - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    process = await asyncio.create_subprocess_exec(
        *(python, "-m", "vllm.entrypoints.launchers.grpc_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
        *("--max-model-len", str(max_length), "--max-num-seqs", str(max_num_seqs)),
        *("--max-num-batched-tokens", str(budget), "--no-enable-prefix-caching"),
        env={**os.environ, **settings},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,  # its stderr is inherited
        start_new_session=True,
    )
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            starting = asyncio.ensure_future(channel.channel_ready())
            ending = asyncio.ensure_future(process.wait())
            await asyncio.wait(
                (starting, ending), timeout=_START_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
            )
            ending.cancel()
            if not starting.done():
                starting.cancel()
                raise SystemExit(f"vLLM's gRPC server is not ready: {process.returncode=}")
        os.killpg(process.pid, signal.SIGSTOP)
        yield VllmService(process, address)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _read(arguments: list[str]) -> dict[str, list[float]]:
    """Read streams that start together; return lists by name: the TTFTs ("ttft"), the times between
    messages ("itl") and the elapsed time, all in seconds, and the number of tokens.
    """
    address, *numbers, start_at = arguments
    num_streams, num_prompt, num_new, vocab_size, seed = map(int, numbers)
    protocol: Any = import_module("smg_grpc_proto")
    messages, calls = protocol.vllm_engine_pb2, protocol.vllm_engine_pb2_grpc
    source = random.Random(seed)
    found: dict[str, list[float]] = {"ttft": [], "itl": [], "num_tokens": [0], "elapsed_s": []}
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        engine = calls.VllmEngineStub(channel)
        requests = [
            messages.GenerateRequest(
                request_id=f"{seed}-{index}",
                tokenized=messages.TokenizedInput(
                    input_ids=[source.randrange(3, vocab_size) for _ in range(num_prompt)]
                ),
                sampling_params=messages.SamplingParams(
                    temperature=_TEMPERATURE, top_p=1.0, max_tokens=num_new, ignore_eos=True, n=1
                ),
                stream=True,
            )
            for index in range(num_streams)
        ]
        await asyncio.sleep(max(0.0, float(start_at) - time.time()))
        start_s = time.perf_counter()

        async def read(request: Any) -> None:
            last_s, times = time.perf_counter(), found["ttft"]
            async for answer in engine.Generate(request):
                if answer.HasField("chunk") and answer.chunk.token_ids:
                    now_s = time.perf_counter()
                    times.append(now_s - last_s)
                    found["num_tokens"][0] += len(answer.chunk.token_ids)
                    last_s, times = now_s, found["itl"]

        await asyncio.gather(*map(read, requests))
        found["elapsed_s"].append(time.perf_counter() - start_s)
    return found


if __name__ == "__main__":
    print_usage(__doc__, num_arguments=7)
    print(json.dumps(asyncio.run(_read(sys.argv[1:]))))
