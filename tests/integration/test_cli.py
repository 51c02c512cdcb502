"""Runs the `penstock` commands as processes against a real gRPC server with scripted behaviour."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import grpc
import pytest
from grpc_health.v1 import health_pb2

from google.rpc import error_details_pb2
from support.cli_process import PROGRAM, environment, penstock, started
from support.scripted_server import (
    ScriptedServer,
    ServedCall,
    error_info,
    retry_info,
    send_tokens_and_wait,
)
from support.timeout import TEST_TIMEOUT_S


async def test_generate_prints_text_then_one_line(server: ScriptedServer) -> None:
    result = await penstock(server, "generate", "Hi", "--max-tokens", "5", "--temperature", "0.5")

    assert result.code == 0
    assert result.out == "Hello, world\n"
    assert result.err == (
        "queue 2.0 ms | TTFT 12.5 ms | 2.0 tokens/s | finish length"
        " | 2 tokens (prompt 3, cached 1)\n"
    )
    request = server.requests[0].request
    assert request.text_prompt.text == "Hi"
    assert request.stopping.max_tokens == 5
    assert request.sampling.temperature == 0.5


async def test_tokens_are_printed_as_they_are_generated(server: ScriptedServer) -> None:
    proceed = asyncio.Event()

    async def pause(call: ServedCall) -> None:
        await call.accepted()
        await call.tokens("first")
        await proceed.wait()
        await call.tokens(" second")
        await call.finished()

    server.scripts.append(pause)
    async with started(server, "generate", "Hi") as process:
        assert process.stdout is not None
        first = await asyncio.wait_for(process.stdout.readexactly(5), TEST_TIMEOUT_S)
        proceed.set()
        rest, _ = await asyncio.wait_for(process.communicate(), TEST_TIMEOUT_S)

    assert (first, rest) == (b"first", b" second\n")


async def test_every_option_reaches_the_request(server: ScriptedServer) -> None:
    flags = (
        *("--model", "demo", "--top-p", "0.5", "--top-k", "7", "--seed", "9", "--n", "2"),
        *("--stop", "a", "--stop", "b", "--priority", "-4", "--time-limit", "1.5"),
        *("--deadline", "30", "--adapter", "poet", "--choice", "yes", "--choice", "no"),
    )

    result = await penstock(server, "generate", "-", *flags, stdin="from stdin")

    assert result.code == 0
    call = server.requests[0]
    request = call.request
    assert request.text_prompt.text == "from stdin"
    assert request.model == "demo"
    assert request.sampling.top_p == 0.5
    assert (request.sampling.top_k, request.sampling.seed, request.sampling.num_outputs) == (
        7,
        9,
        2,
    )
    assert request.adapter.name == "poet"
    assert list(request.constraint.choice.choices) == ["yes", "no"]
    assert list(request.stopping.stop_strings) == ["a", "b"]
    assert request.scheduling.priority == -4
    assert request.scheduling.time_limit.ToMilliseconds() == 1500
    assert call.time_remaining_s is not None


async def test_several_outputs_are_shown_one_after_the_other(server: ScriptedServer) -> None:
    async def two(call: ServedCall) -> None:
        await call.accepted()
        for text, index in (("a", 0), ("x", 1), ("b", 0), ("y", 1)):
            await call.tokens(text, index)
        await call.finished(2, 2)

    server.scripts.append(two)

    result = await penstock(server, "generate", "Hi", "--n", "2")

    assert result.out == "--- output 0 (length)\nab\n--- output 1 (length)\nxy\n"


async def test_ends_of_several_outputs_are_counted(server: ScriptedServer) -> None:
    async def many(call: ServedCall) -> None:
        await call.accepted()
        await call.finished(*[1] * 16)

    server.scripts.append(many)

    result = await penstock(server, "generate", "Hi", "--n", "16")

    assert " | finish length x16 | " in result.err


async def test_json_lines(server: ScriptedServer) -> None:
    result = await penstock(server, "generate", "Hi", "--json")

    events = [json.loads(line) for line in result.out.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds == ["accepted", "progress", "progress", "tokens", "tokens", "finished"]
    assert events[2]["state"] == "PROCESSING"
    assert events[0]["seed"] == 2**63 + 5
    assert events[-1]["outputs"][0]["finish_reason"] == "LENGTH"
    assert events[-1]["timings"]["ttft_s"] == 0.0125
    assert result.err == ""


async def test_a_rejection_is_one_line_with_status_reason_and_field(server: ScriptedServer) -> None:
    async def reject(call: ServedCall) -> None:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field="sampling.top_p", description="must be in (0, 1]")
        code = grpc.StatusCode.INVALID_ARGUMENT
        await call.fail(code, "one bad field", error_info("INVALID_ARGUMENT"), bad)

    server.scripts.append(reject)

    result = await penstock(server, "generate", "Hi", "--top-p", "7")

    assert result.code == 1
    assert result.out == ""
    assert result.err == (
        "penstock generate: INVALID_ARGUMENT: one bad field; --top-p must be in (0, 1]\n"
    )


async def test_a_failure_after_output_keeps_the_text(server: ScriptedServer) -> None:
    async def fail(call: ServedCall) -> None:
        await call.accepted("r-77")
        await call.tokens("half")
        await call.fail(grpc.StatusCode.INTERNAL, "oh", error_info("EXECUTOR_REQUEST_FAILED"))

    server.scripts.append(fail)

    result = await penstock(server, "generate", "Hi")

    assert result.code == 1
    assert result.out == "half\n"
    assert "INTERNAL (EXECUTOR_REQUEST_FAILED): oh [request r-77]" in result.err
    assert "Traceback" not in result.err


async def test_a_full_queue_has_a_retry_time(server: ScriptedServer) -> None:
    async def reject(call: ServedCall) -> None:
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        await call.fail(code, "full", error_info("QUEUE_FULL"), retry_info(90.0))

    server.scripts.append(reject)

    result = await penstock(server, "generate", "Hi", "--deadline", "60")

    assert result.code == 1
    assert "RESOURCE_EXHAUSTED (QUEUE_FULL): full; retry in 90 s" in result.err


async def test_a_deadline_has_its_own_exit_code(server: ScriptedServer) -> None:
    server.scripts.append(send_tokens_and_wait)

    result = await penstock(server, "generate", "Hi", "--deadline", "5")

    assert result.code == 4
    assert result.out == "begun\n"
    assert "DEADLINE_EXCEEDED" in result.err


@pytest.mark.parametrize(
    ("args", "stdin"),
    [(("generate", "Hi"), ""), (("health",), ""), (("chat",), "Hi\n"), (("chat",), "")],
)
async def test_an_unreachable_service_has_its_own_exit_code(
    server: ScriptedServer, args: tuple[str, ...], stdin: str
) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        result = await penstock(server, *args, "--address", address, stdin=stdin)

    assert result.code == 3
    assert "UNAVAILABLE" in result.err
    assert "Traceback" not in result.err


async def test_input_that_is_not_utf_8_is_a_usage_error(server: ScriptedServer) -> None:
    async with started(server, "generate", "-") as process:
        _, err = await asyncio.wait_for(process.communicate(b"\xff\xfe"), TEST_TIMEOUT_S)

    assert process.returncode == 2
    assert err == b"penstock generate: prompt: the prompt is not valid UTF-8\n"


async def test_ctrl_c_cancels_the_request(server: ScriptedServer) -> None:
    server.scripts.append(send_tokens_and_wait)
    async with started(server, "generate", "Hi") as process:
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readexactly(5), TEST_TIMEOUT_S)
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), TEST_TIMEOUT_S)

    await asyncio.wait_for(server.requests[0].cancelled.wait(), TEST_TIMEOUT_S)
    assert process.returncode == 130
    assert out == b"\n"
    assert err == b"penstock generate: interrupted\n"


async def test_a_closed_pipe_cancels_the_request(server: ScriptedServer) -> None:
    async def speak_for_ever(call: ServedCall) -> None:
        await call.accepted()
        try:
            for _ in range(100_000):
                await call.tokens("word " * 100)
        except (asyncio.CancelledError, grpc.aio.UsageError):
            call.cancelled.set()
            raise

    server.scripts.append(speak_for_ever)
    read_end, write_end = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *("generate", "Hi"),
        stdout=write_end,
        stderr=asyncio.subprocess.PIPE,
        env=environment(PENSTOCK_ADDRESS=server.address),
    )
    os.close(write_end)
    await asyncio.to_thread(os.read, read_end, 5)
    os.close(read_end)
    _, err = await asyncio.wait_for(process.communicate(), TEST_TIMEOUT_S)

    assert process.returncode == 141
    assert err == b""


@pytest.fixture
def full_device() -> Iterator[IO[bytes]]:
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("needs a device that is always full")
    with path.open("wb") as full:
        yield full


@pytest.mark.parametrize(
    "args",
    [
        ("generate", "Hi"),
        ("generate", "Hi", "--json"),
        ("chat",),
        ("models",),
        ("health",),
        ("version",),
    ],
)
async def test_an_output_error_is_reported_in_one_line(
    server: ScriptedServer, full_device: IO[bytes], args: tuple[str, ...]
) -> None:
    async with started(server, *args, stdout=full_device) as process:
        _, err = await asyncio.wait_for(process.communicate(b"Hi\n"), TEST_TIMEOUT_S)

    assert process.returncode == 5
    line = "input or output failed: [Errno 28] No space left on device"
    assert err.decode() == f"penstock {args[0]}: {line}\n"


async def test_an_output_error_cancels_the_request(
    server: ScriptedServer, full_device: IO[bytes]
) -> None:
    server.scripts.append(send_tokens_and_wait)

    # Not even the error can be written, so only the exit code reports it.
    outputs = {"stdout": full_device, "stderr": full_device}
    async with started(server, "generate", "Hi", **outputs) as process:
        await asyncio.wait_for(process.communicate(), TEST_TIMEOUT_S)

    await asyncio.wait_for(server.requests[0].cancelled.wait(), TEST_TIMEOUT_S)
    assert process.returncode == 5


async def test_models_as_a_table_and_as_json(server: ScriptedServer) -> None:
    table = await penstock(server, "models")
    lines = await penstock(server, "models", "--json")

    rows = [line.split() for line in table.out.splitlines()]
    assert rows[0][:4] == ["MODEL", "STATE", "EXECUTOR", "CONTEXT"]
    assert rows[1] == ["demo", "ready", "simulated", "512", "2048", "yes", "small"]
    assert rows[2][0] == "second"
    demo = json.loads(lines.out.splitlines()[0])
    assert demo["limits"]["max_total_tokens"] == 512
    assert demo["features"] == {"logprobs": True, "images": False}


async def test_health_is_reported_by_the_exit_code(server: ScriptedServer) -> None:
    serving = await penstock(server, "health")
    service = "penstock.v1.GenerationService"
    await server.health.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
    draining = await penstock(server, "health")
    whole_server = await penstock(server, "health", "--service", "")

    assert (serving.code, serving.out) == (0, "SERVING\n")
    assert (draining.code, draining.out) == (1, "NOT_SERVING\n")
    assert (whole_server.code, whole_server.out) == (0, "SERVING\n")
