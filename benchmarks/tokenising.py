"""Measures the effect of one client's long texts on other clients of the same front process.

Runs a service with one front (gRPC server process) and the simulated executor. First, large
messages are sent one at a time, such as 1 MiB of text as a prompt, as a chat and to `Tokenize`.
Reports the longest time for which the event loop was blocked (median of three runs), with the CPU
time of its thread and its process meanwhile; also for a long response with log probabilities. Then
one tenant repeatedly sends 64 concurrent prompts of 1 MB, all of which are rejected. The benchmark
reports the time to first token of another tenant's short prompts, with and without the flood, and
whether a front process was killed. A block that exceeds the goal is inconclusive if the process
used less CPU time than the goal meanwhile.

    python benchmarks/tokenising.py [--full] [--part stops|flood] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc.aio

from load import TENANT_KEY, LoadRequest, RequestOutcome, closed_loop, read
from loop_ticks import FOLDER_VARIABLE, TickReader
from penstock.client import NO_RETRY, Client, PoolConfig
from penstock.executor.models import resolve_model
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from penstock.v1 import model_service_pb2 as model_pb
from penstock.v1 import model_service_pb2_grpc as model_grpc
from penstock.v1.generation_service_pb2 import (
    GenerateOnceRequest,
    GenerateRequest,
    MultiplexRequest,
)
from penstock.v1.options_pb2 import OutputOptions, StoppingOptions
from penstock.v1.prompt_pb2 import ChatMessage, ContentPart, TextPrompt
from report import Outcome, arguments, at_most, percentile_ms, print_rows, progress, run_parts
from services import Service, line_of, process, service, simulated

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
_CALL_S = 120.0
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))


def model_of(folder: Path, num_positions: int) -> Path:
    """Copy the demo model to a folder in `folder`, with a context of `num_positions` tokens; return
    its path.
    """
    made = folder / f"model-{num_positions}"
    shutil.copytree(resolve_model("demo"), made)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = num_positions
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def options_of(model: Path, num_positions: int) -> tuple[str, ...]:
    """Return options of a service that accepts prompts up to the context length of `model`."""
    blocks = ("--block-size", "16", "--num-blocks", str(2 * num_positions // 16))
    keys = ("--tenant-metadata-key", TENANT_KEY)
    budget = ("--max-num-batched-tokens", "65536", "--max-seq-len", str(num_positions))
    return ("--model", str(model), *simulated(0.01), *blocks, *keys, *budget)


Call: TypeAlias = Callable[[], tuple[str, Any]]
"""Returns the name of a method and its message, built when it is sent because many are large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopBlock:
    """The longest time for which the event loop was blocked during a call, with the CPU time of its
    thread and its process meanwhile.
    """

    call: str
    stop_ms: float
    thread_ms: float
    process_ms: float
    took_s: float
    answer: str


def _generate(text: str = "", **output: Any) -> GenerateRequest:
    """Return a request for one token; `output`: fields of its output options."""
    return GenerateRequest(
        text_prompt=TextPrompt(text=text) if text else None,
        stopping=StoppingOptions(max_tokens=1),
        output=OutputOptions(**output),
    )


def _token_ids(num_tokens: int) -> GenerateRequest:
    message = _generate()
    message.token_prompt.ids.extend([200] * num_tokens)
    return message


def _chat(*texts: str) -> GenerateRequest:
    message = _generate()
    for text in texts:
        message.chat_prompt.messages.add(role="user", parts=[ContentPart(text=text)])
    return message


def _resumable() -> GenerateRequest:
    message = _generate(_MIB, echo=True)
    message.resume_timeout.FromSeconds(10)
    return message


def _multiplexed() -> MultiplexRequest:
    message = MultiplexRequest()
    message.submit.key = 1
    message.submit.generation.CopyFrom(_generate(_MIB, echo=True))
    return message


def _many_outputs(text: str, max_tokens: int, **output: Any) -> GenerateRequest:
    message = _generate(text, **output)
    message.sampling.num_outputs = 16
    message.stopping.max_tokens = max_tokens
    message.stopping.ignore_eos = True
    return message


def _once(message: GenerateRequest) -> GenerateOnceRequest:
    return GenerateOnceRequest(generation=message)


def _tokenize() -> model_pb.TokenizeRequest:
    return model_pb.TokenizeRequest(text_prompt=TextPrompt(text=_MIB))


def _empty_choices() -> GenerateRequest:
    message = _generate(_SHORT)
    message.constraint.choice.choices.extend([""] * 2_000_000)
    return message


def _empty_messages() -> GenerateRequest:
    message = _generate()
    message.chat_prompt.messages.extend([ChatMessage()] * 2_000_000)
    return message


def _empty_tool() -> GenerateRequest:
    message = _chat(_SHORT)
    message.chat_prompt.tools.add().update({"a": [{}] * 30_000})
    return message


_LOGPROBS = "GenerateOnce, 16 outputs of 1,250 tokens with 20 logprobs"
CALLS: dict[str, Call] = {
    "nothing": lambda: ("", None),
    "a prompt of 1 MiB, served": lambda: ("Generate", _generate(_MIB)),
    "a prompt, echoed": lambda: ("Generate", _generate(_MIB, echo=True)),
    "an echo over Multiplex": lambda: ("Multiplex", _multiplexed()),
    "an echo that may be resumed": lambda: ("Generate", _resumable()),
    "GenerateOnce, echo and ids": lambda: (
        *("GenerateOnce", _once(_generate(_MIB, echo=True, return_token_ids=True))),
    ),
    "GenerateOnce, prompt logprobs": lambda: (
        *("GenerateOnce", _once(_generate(_MIB, prompt_logprobs=1))),
    ),
    "prompt logprobs": lambda: ("Generate", _generate(_MIB, prompt_logprobs=1)),
    "a prompt of 1 Mi token ids, served": lambda: ("Generate", _token_ids(_NUM_IDS)),
    "a prompt of 1 Mi token ids, rejected": lambda: ("Generate", _token_ids(_NUM_IDS + 1)),
    "a chat of 1 MiB": lambda: ("Generate", _chat(*[_MIB[: (1 << 16) - 64]] * 16)),
    "Tokenize, 1 MiB": lambda: ("Tokenize", _tokenize()),
    "Detokenize, 256 Ki tokens": lambda: (
        *("Detokenize", model_pb.DetokenizeRequest(token_ids=[60] * (1 << 18))),
    ),
    _LOGPROBS: lambda: ("GenerateOnce", _once(_many_outputs(_SHORT, 1250, logprobs=20))),
    "4 MiB of empty choices": lambda: ("Generate", _empty_choices()),
    "4 MiB of empty chat messages": lambda: ("Generate", _empty_messages()),
    "a tool of 120 KiB of empty objects": lambda: ("Generate", _empty_tool()),
    "a prompt of 1 MiB for 16 outputs": lambda: ("Generate", _many_outputs(_MIB, 1)),
}


async def send(channel: grpc.aio.Channel, call: Call) -> str:
    """Send one of the calls; return "OK", or the status of the error.

    The generated stubs are used, because Penstock's client cannot send many of these messages.
    """
    method, message = call()
    stubs = (pb_grpc.GenerationServiceStub(channel), model_grpc.ModelServiceStub(channel))
    try:
        if not method:
            await asyncio.sleep(1.0)  # the reference: an idle loop
        elif method in ("Generate", "Multiplex"):
            given = message if method == "Generate" else iter((message,))
            async for _ in getattr(stubs[0], method)(given, timeout=_CALL_S):
                pass
        else:
            stub: Any = stubs[method in ("Tokenize", "Detokenize")]
            await getattr(stub, method)(message, timeout=_CALL_S)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def measure_stops(ticks: Path, folder: Path) -> list[LoopBlock]:
    """Return the longest block of the front's event loop during each call, the median of three."""
    model = model_of(folder, _NUM_POSITIONS)
    found: list[LoopBlock] = []
    with service(*options_of(model, _NUM_POSITIONS)) as serving:
        reader = TickReader(ticks, serving.wait_until_ready("front", 1).pid)
        async with grpc.aio.insecure_channel(serving.address, options=_OPTIONS) as channel:
            await send(channel, lambda: ("Generate", _generate(_SHORT)))
            for name, call in CALLS.items():
                # Warm-up: the first such text makes the process allocate memory.
                await send(channel, call)
                stops = [await measure_block(reader, channel, name) for _ in range(NUM_TIMES)]
                found.append(sorted(stops, key=lambda one: one.stop_ms)[NUM_TIMES // 2])
                progress(str(found[-1]))
    return found


async def measure_block(reader: TickReader, channel: grpc.aio.Channel, name: str) -> LoopBlock:
    """Return the longest time for which the event loop was blocked during one call."""
    reader.switch(is_on=True)
    await asyncio.sleep(0.2)
    began_s = time.monotonic()
    answer = await send(channel, CALLS[name])
    ended_s = time.monotonic()
    await asyncio.sleep(0.1)
    stop_ms, thread_ms, process_ms = reader.longest_ms(began_s - 0.01, ended_s + 0.05)
    reader.switch(is_on=False)
    return LoopBlock(
        call=name,
        stop_ms=stop_ms,
        thread_ms=thread_ms,
        process_ms=process_ms,
        took_s=ended_s - began_s,
        answer=answer,
    )


def stops(options: Namespace) -> Outcome:
    """Measure how long each call blocks the loop. A block over the goal is inconclusive if the
    process used less CPU time than the goal meanwhile, because another process then caused it.
    """
    del options
    with ticking() as (folder, ticks):
        found = asyncio.run(measure_stops(ticks, folder))
    print_rows("1 MiB of text comes in", found)
    return found, [
        at_most(
            f"longest stop of the front's loop, {one.call}",
            one.stop_ms,
            *(GOAL_STOP_MS, "ms"),
            is_settled=one.stop_ms <= GOAL_STOP_MS or one.process_ms > GOAL_STOP_MS,
        )
        for one in found
        if one.call != "nothing"
    ]


@contextmanager
def ticking() -> Generator[tuple[Path, Path]]:
    """Set the environment so that every front started from now on has a ticker in its event loop;
    yield a folder for models, and the folder of the ticks.
    """
    with tempfile.TemporaryDirectory() as folder:
        ticks = Path(folder) / "ticks"
        ticks.mkdir()
        paths = [str(_HERE / "ticking_site"), str(_HERE), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        os.environ[FOLDER_VARIABLE] = str(ticks)
        yield Path(folder), ticks


def flood(options: Namespace) -> Outcome:
    """Measure another tenant's TTFT, without and with the flood, and count killed fronts."""
    duration_s, num_positions = 60.0 if options.full else 15.0, 1 << 17
    with ticking() as (folder, ticks):
        model = model_of(folder, num_positions)
        with service(*options_of(model, num_positions)) as serving:
            reader = TickReader(ticks, serving.wait_until_ready("front", 1).pid)
            reader.switch(is_on=True)
            # Not counted: the first calls warm up the service.
            asyncio.run(short_calls(serving, 2.0))
            quiet = asyncio.run(short_calls(serving, duration_s))
            command = (sys.executable, __file__, "--attack", serving.address, str(duration_s))
            with process(*command) as attacker:
                line_of(attacker)
                began_s = time.monotonic()
                flooded = asyncio.run(short_calls(serving, duration_s))
                lags_ms = reader.lags_ms(began_s, time.monotonic() - 0.1)
                assert attacker.stdout is not None
                ends = attacker.stdout.readline().strip()
            num_killed = sum("killing it" in line for line in serving.log)
            num_killed += len(serving.up["front"]) - 1
    rows = [
        {
            "": name,
            "calls": len(seen),
            "errors": sum(one.end != "OK" for one in seen),
            **{f"p{percent} ms": ttft_ms(seen, percent) for percent in (50, 99, 100)},
        }
        for name, seen in (("quiet", quiet), ("flooded", flooded))
    ]
    print_rows("Time to first token of another tenant", rows)
    print(f"\nthe flood: {ends}; the front's loop was late by {lags_ms.max():.1f} ms at most")
    ratio = ttft_ms(flooded, 99) / ttft_ms(quiet, 99)
    name = "TTFT p99 of another tenant beside 64 rejected prompts of 1 MB, to quiet"
    return rows, [
        at_most(name, ratio, GOAL_RATIO, "x"),
        at_most("fronts killed", num_killed, 0),
    ]


def ttft_ms(seen: list[RequestOutcome], percent: float) -> float:
    """Return a percentile of the TTFT, ms."""
    return percentile_ms([one.ttft_s for one in seen if one.ttft_s is not None], percent)


async def short_calls(serving: Service, duration_s: float) -> list[RequestOutcome]:
    """Send short prompts of a tenant, one after another, for `duration_s` seconds; return the
    results.
    """
    found: list[RequestOutcome] = []
    async with Client(serving.address, retry=NO_RETRY) as client:

        async def call(_: int) -> None:
            events = client.generate(
                _SHORT, max_tokens=1, metadata=((TENANT_KEY, "other"),), deadline_s=_CALL_S
            )
            found.append(await read(events, LoadRequest(num_tokens=1)))
            await asyncio.sleep(0.005)

        await closed_loop(call, 1, duration_s)
    return found


async def attack(address: str, duration_s: float) -> dict[str, int]:
    """Send waves of 64 concurrent prompts of 1 MB, each over its own connection; return the number
    of calls by status.
    """
    # Runs in another process, because a real attacker would use another machine.
    os.nice(10)
    ends: Counter[str] = Counter()
    pool = PoolConfig(num_channels=NUM_ATTACKERS)
    async with Client(address, retry=NO_RETRY, pool=pool) as client:

        async def send_one() -> None:
            events = client.generate(
                _MB, max_tokens=1, metadata=((TENANT_KEY, "hog"),), deadline_s=_CALL_S
            )
            ends[(await read(events, LoadRequest(num_tokens=1))).code] += 1

        async def wave(_: int) -> None:
            began_s = time.monotonic()
            await asyncio.gather(*(send_one() for _ in range(NUM_ATTACKERS)))
            await asyncio.sleep(max(0.0, began_s + WAVE_S - time.monotonic()))

        print("ready", flush=True)
        await closed_loop(wave, 1, duration_s)
    return dict(ends)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        print(json.dumps(asyncio.run(attack(sys.argv[2], float(sys.argv[3])))))
    else:
        run_parts(arguments(__doc__), {"stops": stops, "flood": flood})
