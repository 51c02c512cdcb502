"""The effect of one client's long texts on other clients of the same front-end process.

Runs a service with one front process and the simulated executor. First, 1 MiB of text is sent: as
an accepted prompt, as a prompt that is too long, as a chat, and to `Tokenize`. Reports the longest
time for which the event loop was blocked (median of three runs), with the CPU time of its thread
and its process meanwhile; also for a long response with log probabilities. Then one tenant
repeatedly sends 64 concurrent prompts of 1 MB, all of which are rejected. The benchmark reports the
time to first token of another tenant's short prompts, with and without the flood, and whether a
front process was killed. Results are not reported if the machine blocked even an idle loop.

    python benchmarks/tokenising.py [--full] [--only stops|flood] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from loop_ticks import FOLDER_VARIABLE, TickReader
from penstock.executor.models import resolve_model
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from penstock.v1 import model_service_pb2 as model_pb
from penstock.v1 import model_service_pb2_grpc as model_grpc
from penstock.v1.generation_service_pb2 import (
    GenerateOnceRequest,
    GenerateRequest,
    MultiplexRequest,
)
from penstock.v1.options_pb2 import OutputOptions
from penstock.v1.prompt_pb2 import ChatMessage, ContentPart
from report import Check, arguments, at_most, conclude, print_table, progress
from services import Service, service, simulated

GOAL_STOP_MS = 15.0
GOAL_RATIO = 2.0
NUM_TIMES = 3
NUM_ATTACKERS = 64
WAVE_S = 2.0
_HERE = Path(__file__).resolve().parent
_WORDS = "To be or not to be, that is the question. "
_MIB = (_WORDS * 30_000)[: 1 << 20]
_MB = _MIB[:1_000_000]
_SHORT = _WORDS * 24
_NUM_POSITIONS = 1 << 20
_NUM_IDS = _NUM_POSITIONS - 1
"""Length of the longest prompt with which one output token fits."""
_TENANT_KEY = "x-tenant"
_CALL_S = 120.0
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))


def model_of(folder: Path, num_positions: int) -> Path:
    """Copy the demo model with a context of `num_positions` tokens."""
    made = folder / f"model-{num_positions}"
    shutil.copytree(resolve_model("demo"), made)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = num_positions
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def options_of(model: Path, num_positions: int) -> tuple[str, ...]:
    """Return options of a service that accepts a prompt as long as the context."""
    blocks = ("--block-size", "16", "--num-blocks", str(2 * num_positions // 16))
    keys = ("--tenant-metadata-key", _TENANT_KEY)
    budget = ("--max-num-batched-tokens", "65536", "--max-seq-len", str(num_positions))
    return ("--model", str(model), *simulated(0.01), *blocks, *keys, *budget)


async def stops(ticks: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Return, by kind of call, the longest time in ms for which the front's event loop was blocked,
    and the call's result."""
    model = model_of(folder, _NUM_POSITIONS)
    found: dict[str, dict[str, Any]] = {}
    with service(*options_of(model, _NUM_POSITIONS)) as serving:
        reader = TickReader(ticks, serving.until_up("front", 1).pid)
        async with grpc.aio.insecure_channel(serving.address, options=_OPTIONS) as channel:
            await generate(channel, GenerateRequest(), _SHORT)
            for name, call in calls_of(channel).items():
                # Warm-up: the first such text makes the process allocate memory.
                await call()
                rows = sorted([await stop(reader, call) for _ in range(NUM_TIMES)], key=_stop_ms)
                found[name] = rows[NUM_TIMES // 2]
                progress(f"{name}: {found[name]}")
    return found


async def stop(reader: TickReader, call: Callable[[], Awaitable[str]]) -> dict[str, Any]:
    """Return the longest time for which the event loop was blocked during one call."""
    reader.switch(is_on=True)
    await asyncio.sleep(0.2)
    began_s = time.monotonic()
    answer = await call()
    ended_s = time.monotonic()
    await asyncio.sleep(0.1)
    stop_ms, thread_ms, process_ms = reader.longest_ms(began_s - 0.01, ended_s + 0.05)
    reader.switch(is_on=False)
    return {
        "stop_ms": stop_ms,
        "thread_ms": thread_ms,
        "process_ms": process_ms,
        "took_s": ended_s - began_s,
        "answer": answer,
    }


def _stop_ms(row: dict[str, Any]) -> float:
    return float(row["stop_ms"])


def calls_of(channel: grpc.aio.Channel) -> dict[str, Callable[[], Awaitable[str]]]:
    """Return calls that send 1 MiB of text, and a call that only waits a second, as the
    reference.
    """
    models = model_grpc.ModelServiceStub(channel)

    async def served() -> str:
        return await generate(channel, GenerateRequest(), _MIB)

    async def listed(num_tokens: int = _NUM_IDS) -> str:
        message = GenerateRequest()
        message.token_prompt.ids.extend([200] * num_tokens)
        return await generate(channel, message)

    async def listed_over() -> str:
        return await listed(_NUM_IDS + 1)

    async def chat() -> str:
        message = GenerateRequest()
        for _ in range(16):
            message.chat_prompt.messages.add(
                role="user", parts=[ContentPart(text=_MIB[: (1 << 16) - 64])]
            )
        return await generate(channel, message)

    async def tokenized() -> str:
        request = model_pb.TokenizeRequest()
        request.text_prompt.text = _MIB
        ids = (await models.Tokenize(request, timeout=_CALL_S)).token_ids
        return f"{len(ids)} tokens"

    async def detokenized() -> str:
        request = model_pb.DetokenizeRequest(token_ids=[60] * (1 << 18))
        return f"{len((await models.Detokenize(request, timeout=_CALL_S)).text)} characters"

    async def answered() -> str:
        message = GenerateOnceRequest()
        message.generation.output.logprobs = 20
        message.generation.text_prompt.text = _SHORT
        message.generation.sampling.num_outputs = 16
        message.generation.stopping.max_tokens = 1250
        message.generation.stopping.ignore_eos = True
        stub = pb_grpc.GenerationServiceStub(channel)
        outputs = (await stub.GenerateOnce(message, timeout=_CALL_S)).outputs
        return f"{sum(len(output.records) for output in outputs)} records"

    async def nothing() -> str:
        await asyncio.sleep(1.0)
        return ""

    return {
        "nothing": nothing,
        "a prompt of 1 MiB, served": served,
        **echoing(channel),
        "a prompt of 1 Mi token ids, served": listed,
        "a prompt of 1 Mi token ids, rejected": listed_over,
        "a chat of 1 MiB": chat,
        "Tokenize, 1 MiB": tokenized,
        "Detokenize, 256 Ki tokens": detokenized,
        "GenerateOnce, 16 outputs of 1,250 tokens with 20 logprobs": answered,
        **overfull(channel),
    }


def overfull(channel: grpc.aio.Channel) -> dict[str, Callable[[], Awaitable[str]]]:
    """Return calls with megabytes of small elements, and a call for 16 outputs of one prompt."""

    async def empty_choices() -> str:
        message = GenerateRequest()
        message.constraint.choice.choices.extend([""] * (2_000_000))
        return await generate(channel, message, _SHORT)

    async def empty_messages() -> str:
        message = GenerateRequest()
        message.chat_prompt.messages.extend([ChatMessage()] * 2_000_000)
        return await generate(channel, message)

    async def empty_tools() -> str:
        message = GenerateRequest()
        message.chat_prompt.messages.add(role="user", parts=[ContentPart(text=_SHORT)])
        message.chat_prompt.tools.add().update({"a": [{}] * 30_000})
        return await generate(channel, message)

    async def many_outputs() -> str:
        message = GenerateRequest()
        message.sampling.num_outputs = 16
        return await generate(channel, message, _MIB)

    return {
        "4 MiB of empty choices": empty_choices,
        "4 MiB of empty chat messages": empty_messages,
        "a tool of 120 KiB of empty objects": empty_tools,
        "a prompt of 1 MiB for 16 outputs": many_outputs,
    }


def echoing(channel: grpc.aio.Channel) -> dict[str, Callable[[], Awaitable[str]]]:
    """Return calls whose responses contain a prompt of 1 MiB."""

    async def echoed() -> str:
        message = GenerateRequest()
        message.output.echo = True
        return await generate(channel, message, _MIB)

    async def multiplexed() -> str:
        message = MultiplexRequest()
        message.submit.key = 1
        message.submit.generation.output.echo = True
        message.submit.generation.text_prompt.text = _MIB
        message.submit.generation.stopping.max_tokens = 1
        call = pb_grpc.GenerationServiceStub(channel).Multiplex(timeout=_CALL_S)
        await call.write(message)
        await call.done_writing()
        num_chars = 0
        async for response in call:
            num_chars += sum(len(event.response.prompt.text) for event in response.events)
        return f"{num_chars} characters"

    async def resumable() -> str:
        message = GenerateRequest()
        message.output.echo = True
        message.resume_timeout.FromSeconds(10)
        return await generate(channel, message, _MIB)

    async def once(output: OutputOptions) -> str:
        message = GenerateOnceRequest()
        message.generation.output.CopyFrom(output)
        message.generation.text_prompt.text = _MIB
        message.generation.stopping.max_tokens = 1
        stub = pb_grpc.GenerationServiceStub(channel)
        prompt = (await stub.GenerateOnce(message, timeout=_CALL_S)).prompt
        return f"{len(prompt.text)} characters, {len(prompt.records)} records"

    async def once_echoed() -> str:
        return await once(OutputOptions(echo=True, return_token_ids=True))

    async def once_rated() -> str:
        return await once(OutputOptions(prompt_logprobs=1))

    async def rated() -> str:
        message = GenerateRequest()
        message.output.prompt_logprobs = 1
        return await generate(channel, message, _MIB)

    return {
        "a prompt, echoed": echoed,
        "an echo over Multiplex": multiplexed,
        "an echo that may be resumed": resumable,
        "GenerateOnce, echo and ids": once_echoed,
        "GenerateOnce, prompt logprobs": once_rated,
        "prompt logprobs": rated,
    }


async def generate(channel: grpc.aio.Channel, message: GenerateRequest, text: str = "") -> str:
    """Return "OK", or the status of the error."""
    if text:
        message.text_prompt.text = text
    message.stopping.max_tokens = 1
    stub = pb_grpc.GenerationServiceStub(channel)
    try:
        async for _ in stub.Generate(message, timeout=_CALL_S):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def flood(ticks: Path, folder: Path, duration_s: float) -> dict[str, Any]:
    """Return the other tenant's TTFT in ms, without and with the flood."""
    num_positions = 1 << 17
    model = model_of(folder, num_positions)
    with service(*options_of(model, num_positions)) as serving:
        reader = TickReader(ticks, serving.until_up("front", 1).pid)
        reader.switch(is_on=True)
        # Not counted: the first calls warm up the service.
        await first_tokens_ms(serving, 2.0)
        quiet = await first_tokens_ms(serving, duration_s)
        attack = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--attack", serving.address, str(duration_s)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert attack.stdout is not None
        await attack.stdout.readline()
        began_s = time.monotonic()
        flooded = await first_tokens_ms(serving, duration_s)
        lags = reader.lags_ms(began_s, time.monotonic() - 0.1)
        told, _ = await attack.communicate()
        return {
            "quiet": quiet,
            "flooded": flooded,
            "attack": json.loads(told),
            "loop_lag_p99_ms": float(np.percentile(lags, 99)),
            "loop_lag_max_ms": float(lags.max()),
            "num_killed": sum("killing it" in line for line in serving.log),
            "num_fronts_started": len(serving.up["front"]),
        }


async def first_tokens_ms(serving: Service, duration_s: float) -> dict[str, float]:
    """Return the TTFT, ms, of short prompts sent one after another."""
    message = GenerateRequest()
    message.text_prompt.text = _SHORT
    message.stopping.max_tokens = 1
    times: list[float] = []
    errors = 0
    async with grpc.aio.insecure_channel(serving.address, options=_OPTIONS) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            began_s = time.perf_counter()
            call: Any = stub.Generate(message, metadata=((_TENANT_KEY, "other"),), timeout=_CALL_S)
            try:
                async for event in call:
                    if event.WhichOneof("event") == "tokens":
                        times.append((time.perf_counter() - began_s) * 1e3)
            except grpc.aio.AioRpcError:
                errors += 1
            await asyncio.sleep(0.005)
    return {
        "num": len(times),
        "errors": errors,
        "p50_ms": float(np.percentile(times, 50)),
        "p99_ms": float(np.percentile(times, 99)),
        "max_ms": max(times),
    }


async def attack(address: str, duration_s: float) -> dict[str, int]:
    """Send waves of 64 concurrent prompts of 1 MB; return the number of calls by status."""
    # Runs in another process, because a real attacker would use another machine.
    os.nice(10)
    message = GenerateRequest()
    message.text_prompt.text = _MB
    message.stopping.max_tokens = 1
    answers: Counter[str] = Counter()
    channels = [grpc.aio.insecure_channel(address, options=_OPTIONS) for _ in range(NUM_ATTACKERS)]
    print("ready", flush=True)

    async def send(channel: grpc.aio.Channel) -> None:
        call: Any = pb_grpc.GenerationServiceStub(channel).Generate(
            message, metadata=((_TENANT_KEY, "hog"),), timeout=_CALL_S
        )
        try:
            async for _ in call:
                pass
            answers["OK"] += 1
        except grpc.aio.AioRpcError as error:
            answers[error.code().name] += 1

    until_s = time.monotonic() + duration_s
    while (began_s := time.monotonic()) < until_s:
        await asyncio.gather(*(send(channel) for channel in channels))
        await asyncio.sleep(max(0.0, began_s + WAVE_S - time.monotonic()))
    for channel in channels:
        await channel.close()
    return dict(answers)


def checks_of_stops(found: dict[str, dict[str, Any]]) -> list[Check]:
    """Return a check for the longest block of the event loop by each call. A block that is longer
    than its CPU time was caused by another process."""
    return [
        at_most(
            f"longest stop of the front's loop, {name}",
            row["stop_ms"],
            GOAL_STOP_MS,
            "ms",
            is_settled=row["stop_ms"] <= GOAL_STOP_MS or row["process_ms"] > GOAL_STOP_MS,
        )
        for name, row in found.items()
        if name != "nothing"
    ]


def checks_of_flood(flooded: dict[str, Any]) -> list[Check]:
    ratio = flooded["flooded"]["p99_ms"] / flooded["quiet"]["p99_ms"]
    return [
        at_most(
            "TTFT p99 of another tenant beside 64 rejected prompts of 1 MB, to quiet",
            ratio,
            GOAL_RATIO,
            "x",
        ),
        at_most(
            "fronts killed", float(flooded["num_killed"] + flooded["num_fronts_started"] - 1), 0.0
        ),
    ]


def main() -> None:
    if sys.argv[1:2] == ["--attack"]:
        print(json.dumps(asyncio.run(attack(sys.argv[2], float(sys.argv[3])))))
        return
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("stops", "flood"))
    options = parser.parse_args()
    duration_s = 60.0 if options.full else 15.0
    with tempfile.TemporaryDirectory() as folder:
        ticks = Path(folder) / "ticks"
        ticks.mkdir()
        paths = [str(_HERE / "ticking_site"), str(_HERE), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        os.environ[FOLDER_VARIABLE] = str(ticks)
        found: dict[str, dict[str, Any]] | None = None
        flooded: dict[str, Any] | None = None
        if options.only != "flood":
            found = asyncio.run(stops(ticks, Path(folder)))
        if options.only != "stops":
            flooded = asyncio.run(flood(ticks, Path(folder), duration_s))
    checks: list[Check] = []
    if found is not None:
        print_table(
            "1 MiB of text comes in",
            ("how", "longest stop ms", "CPU of thread ms", "of process ms", "took s", "answer"),
            [(name, *row.values()) for name, row in found.items()],
        )
        checks += checks_of_stops(found)
    if flooded is not None:
        print_flood(flooded)
        checks += checks_of_flood(flooded)
    conclude(options, {"stops": found, "flood": flooded}, checks)


def print_flood(flooded: dict[str, Any]) -> None:
    print_table(
        "Time to first token of another tenant",
        ("", "calls", "errors", "p50 ms", "p99 ms", "max ms"),
        [(name, *flooded[name].values()) for name in ("quiet", "flooded")],
    )
    print(
        f"\nthe flood: {flooded['attack']}; fronts killed: {flooded['num_killed']};"
        f" the front's loop was late by {flooded['loop_lag_p99_ms']:.1f} ms (p99),"
        f" {flooded['loop_lag_max_ms']:.1f} ms (max)"
    )


if __name__ == "__main__":
    main()
