"""Case 7: a client process is suspended (SIGSTOP), not killed. The service detects this, and
cancels the requests of all its streams, including an idle one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from penstock.server.front.config import FrontConfig
from penstock.server.rpc.options import KeepaliveConfig
from penstock.server.text.model_text import ModelText
from support.fronts import serving
from support.timeout import TEST_TIMEOUT_S, until_true

NUM_TOKENS = 200
# A program with a stream that gets tokens and one that does not, each on its own connection.
CLIENT = """
import sys, grpc
from penstock.v1 import generation_service_pb2 as pb, generation_service_pb2_grpc as pb_grpc
calls = []
for number in range(2):
    channel = grpc.insecure_channel(sys.argv[1], options=[("grpc.use_local_subchannel_pool", 1)])
    message = pb.GenerateRequest(request_id=str(number))
    message.text_prompt.text = "hello"
    calls.append((channel, pb_grpc.GenerationServiceStub(channel).Generate(message)))
for channel, call in calls:
    next(call)
print("streaming", flush=True)
for channel, call in calls:
    for response in call:
        pass
"""


@asynccontextmanager
async def client(address: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, address),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        process.kill()
        await process.communicate()


async def test_case_07_a_stopped_client_is_detected(text: ModelText) -> None:
    keepalive = KeepaliveConfig(server_ping_interval_s=1.0, server_ping_timeout_s=5.0)
    # Only pings can detect it: no stream has unread data for long enough to be cut.
    config = FrontConfig(max_reader_stall_s=3600.0, max_backlog_tokens=10**9)
    async with (
        serving(text, config, keepalive=keepalive) as served,
        client(served.address) as process,
    ):
        keys = {}
        for _ in range(2):
            (spec,) = await served.port.next_submission()
            keys[spec.request_id] = spec.key
            served.port.admit(spec.key)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), TEST_TIMEOUT_S) == b"streaming\n"
        os.kill(process.pid, signal.SIGSTOP)
        served.port.send(keys["0"], served.encode("a") * NUM_TOKENS)
        lost: set[int] = set()
        async with asyncio.timeout(TEST_TIMEOUT_S):
            while lost != set(keys.values()):
                cancelled, _ = await served.port.next_cancel()
                lost.update(cancelled)
            await until_true(lambda: not len(served.server.front.table))
        assert served.server.num_active_calls == 0
