"""No output of a service contains client content, unless content capture is enabled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from integration import canaries
from penstock.client import FlightFormat, OperationsClient, RequestState, ServerProcess
from support.calls import SERVICE, STYLES, TracedCall, until_listed
from support.fronts import SMALL_WINDOW
from support.observation import flight_files, observed, until_stats
from support.otlp_receiver import Receiver, grpc_receiver
from support.service import Service, simulated, until_health
from support.timeout import TEST_TIMEOUT_S

SERVING = health_pb2.HealthCheckResponse.SERVING
FAULTS = [
    {"kind": "request_fails", "at_prompt_token": canaries.POISON, "max_times": 9},
    {"kind": "executor_dies", "at_prompt_token": canaries.DEADLY, "at_output": 2},
]
LONG = 900  # tokens, about eighteen seconds of them


@dataclass
class Site:
    """A service and its outputs. `reported`: outputs that are searched for secrets, by name;
    `outputs`: generated texts.
    """

    service: Service
    operations: OperationsClient
    channel: grpc.aio.Channel
    folder: Path
    engine_pid: int = 0
    outputs: list[str] = field(default_factory=list[str])
    reported: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def call(self, style: str, message: Any, **how: Any) -> TracedCall:
        """Send a request whose metadata contains canaries."""
        channel = how.pop("channel", self.channel)
        return TracedCall(channel, style, message, metadata=canaries.metadata(), **how)

    async def outcome(self, style: str, message: Any, **how: Any) -> str:
        """Return the status of a request; record its generated text, which is also a secret."""
        call = self.call(style, message, **how)
        reported = await call.outcome()
        self.outputs.append(call.text)
        return reported


@contextlib.asynccontextmanager
async def watched(collector: Receiver, folder: Path, *arguments: str) -> AsyncGenerator[Site]:
    options = (
        *simulated(step_s=0.02, faults=FAULTS),
        *("--fronts", "1", "--max-num-seqs", "3", "--max-num-waiting", "4"),
        *("--max-backlog-tokens", "128", "--max-reader-stall-s", "0.3", "--drain-timeout-s", "1"),
        *("--flight-folder", str(folder / "flight"), "--record", str(folder / "record")),
        *("--otlp-endpoint", collector.endpoint, "--log-level", "debug", "--max-replays", "0"),
    )
    async with (
        observed(*options, *arguments) as (service, operations),
        service.channel() as channel,
    ):
        yield Site(service, operations, channel, folder)


async def serve_well(site: Site) -> None:
    for style in STYLES:
        for message in (
            canaries.text_request(24),
            canaries.chat_request(24),
            canaries.ids_request(24),
        ):
            assert await site.outcome(style, message) == "OK"


async def reject(site: Site) -> None:
    for style in STYLES:
        for name, message in canaries.rejected_requests().items():
            if style == "Multiplex" and isinstance(message, bytes):
                continue  # another message; see `break_the_protocol`
            if style == "GenerateOnce" and name == "unknown field":
                continue
            reported = await site.outcome(style, message)
            assert (reported == "OK") is (name in canaries.TAKEN), (style, name, reported)


async def break_the_protocol(site: Site) -> None:
    """Send bytes that are no valid command, and call unknown methods and pages."""
    words = canaries.WORDS
    raw: Any = site.channel
    call = raw.stream_stream(f"/{SERVICE}/Multiplex")(
        iter([words["malformed"].encode()]), metadata=canaries.metadata()
    )
    assert (await call.code()) is grpc.StatusCode.INVALID_ARGUMENT
    call = raw.unary_unary(f"/{SERVICE}/Improvise")(
        words["malformed"].encode(), metadata=canaries.metadata()
    )
    assert (await call.code()) is grpc.StatusCode.UNIMPLEMENTED
    for path in (words["path"], f"metrics?compat={words['path']}", f"?q={words['path']}"):
        await fetched(site, path.replace(" ", "%20"))
        await fetched(site, path.replace(" ", ""))


async def fail(site: Site) -> None:
    """Cause deadlines, cancellations, stalls, executor failures and engine deaths."""
    for style in STYLES:
        message = canaries.ids_request(LONG)
        assert await site.outcome(style, message, timeout_s=0.3) == "DEADLINE_EXCEEDED"
        call = site.call(style, canaries.text_request(LONG))
        await until_listed(site.operations, [call], RequestState.PROCESSING)
        call.call.cancel()
        assert await call.outcome() == "CANCELLED"
        poisoned = canaries.ids_request(9, canaries.POISON)
        assert await site.outcome(style, poisoned) == "INTERNAL"
    await stall(site)
    deadly = canaries.ids_request(9, canaries.DEADLY)
    await site.service.next_pid("engine")
    assert await site.outcome("Generate", deadly) == "UNAVAILABLE"
    site.engine_pid = await site.service.next_pid("engine")
    await until_health(site.channel, SERVING)


async def stall(site: Site) -> None:
    message = canaries.ids_request(LONG)
    message.output.return_token_ids = True
    message.output.logprobs = 20
    async with grpc.aio.insecure_channel(site.service.address, options=SMALL_WINDOW) as channel:
        call = site.call("Generate", message, channel=channel)
        await site.service.until_logged("stalled reader disconnected")
        assert await call.outcome() == "RESOURCE_EXHAUSTED"


async def fetched(site: Site, path: str) -> bytes:
    base = (await site.service.printed_address("metrics")).removesuffix("metrics")

    def fetch() -> bytes:
        try:
            with urllib.request.urlopen(base + path, timeout=TEST_TIMEOUT_S) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            return bytes(error.read())

    return await asyncio.to_thread(fetch)


async def look(site: Site) -> None:
    """Call the methods and pages that show the service's state, while requests run; record the
    responses.
    """
    calls = [site.call("Generate", canaries.text_request(LONG)) for _ in range(3)]
    await until_listed(site.operations, calls, RequestState.PROCESSING)
    operations, reported = site.operations, site.reported
    for path in ("", "metrics", "metrics?compat=trtllm", "metrics?compat=gen_ai", "status.json"):
        reported[f"/{path}"] = await fetched(site, path)
    stats = await until_stats(operations, lambda stats: len(stats.fronts) == 1)
    answers = {
        "stats": await operations.get_stats(),
        "requests": await operations.list_requests(),
        "request": await operations.get_request(calls[0].request_id),
        "steps": await operations.get_flight_steps(),
    }
    reported.update({name: repr(answer).encode() for name, answer in answers.items()})
    for form in FlightFormat:
        reported[f"flight {form}"] = await operations.get_flight_record(file_format=form)
    for process in (ServerProcess.ENGINE, ServerProcess.FRONT):
        index = stats.fronts[0].index if process is ServerProcess.FRONT else None
        reported[f"profile {process}"] = await operations.profile(
            process, front_index=index, duration_s=0.3
        )
    assert calls[0].request_id.encode() in reported["/status.json"]
    await operations.dump_flight_record()
    for call in calls:
        call.call.cancel()
        await call.outcome()


async def end(site: Site) -> None:
    """Kill the engine during requests, then drain the service during others; record all logs and
    files.
    """
    for how in ("kill", "drain"):
        calls = [site.call(style, canaries.ids_request(LONG)) for style in STYLES]
        await until_listed(site.operations, calls, RequestState.PROCESSING)
        if how == "kill":
            os.kill(site.engine_pid, signal.SIGKILL)
        else:
            site.service.signal(signal.SIGTERM)
        assert [await call.outcome() for call in calls] == ["UNAVAILABLE"] * len(calls)
        if how == "kill":
            await site.service.next_pid("engine")
            await until_health(site.channel, SERVING)
    assert await site.service.ended() == 0
    site.reported["log"] = "".join(site.service.stderr).encode()
    site.reported["stdout"] = "".join(site.service.stdout).encode()
    for path in flight_files(site.folder / "flight"):
        site.reported[path.name] = path.read_bytes()
    for path in (site.folder / "record").iterdir():
        site.reported[path.name] = path.read_bytes()


def sought_in(site: Site) -> dict[str, bytes]:
    """Return the secrets to search for, and the beginnings of the generated texts."""
    words = canaries.sought()
    for number, text in enumerate(text for text in site.outputs if len(text) >= 16):
        words[f"output {number}"] = text[:16].encode()
    assert sum(name.startswith("output") for name in words) >= 3 * len(STYLES)
    return words


async def go_through_it(site: Site) -> None:
    await serve_well(site)
    await reject(site)
    await break_the_protocol(site)
    await fail(site)
    await look(site)
    await end(site)


def check_that_it_was_looked_at(site: Site, collector: Receiver) -> None:
    log = site.reported["log"].lower()
    for text in (
        b"the executor failed",
        b"debug",
        b"a request failed",
        b"stalled reader",
        b"killed",
    ):
        assert text in log, text
    assert len(flight_files(site.folder / "flight")) >= 3
    assert len(collector.spans()) > 100
    assert b"penstock_requests_total" in site.reported["/metrics"]


async def test_case_46_no_output_contains_a_secret(tmp_path: Path) -> None:
    with grpc_receiver() as collector:
        async with watched(collector, tmp_path, "--log-format", "json") as site:
            await go_through_it(site)
        for number, payload in enumerate(collector.payloads):
            site.reported[f"export {number}"] = payload
        site.reported["headers of exports"] = repr(collector.metadata).encode()
        check_that_it_was_looked_at(site, collector)
        reported = [json.loads(line) for line in site.service.stderr]
        assert {line["process"] for line in reported} == {
            *("supervisor", "engine", "front", "observer"),
        }
        assert [line for line in reported if line.get("request_id") and line.get("trace_id")]
        assert canaries.find(site.reported, sought_in(site)) == []


async def test_captured_content_is_only_in_spans(tmp_path: Path) -> None:
    with grpc_receiver() as collector:
        async with watched(collector, tmp_path, "--trace-content", "on") as site:
            await go_through_it(site)
        words = sought_in(site)
        assert canaries.find(site.reported, words) == []
        spans = b"".join(collector.payloads)
        in_spans = {leak.place for leak in canaries.find({"spans": spans}, words)}
        assert {"text", "chat", "role"} < in_spans
        assert any(place.startswith("output") for place in in_spans)
        prompt_places = {place for place in in_spans if not place.startswith("output")}
        assert prompt_places == {"text", "chat", "role"}, (
            "content is prompt and output, and nothing else"
        )
