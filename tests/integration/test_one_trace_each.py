"""Requests of each style and each end at a real service: exactly one correct trace each."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from penstock.client import OperationsClient, RequestState
from penstock.server.observe.spans import keys
from penstock.v1 import generation_service_pb2 as pb
from penstock.v1 import generation_service_pb2_grpc as pb_grpc
from support.observation import observed
from support.otlp_receiver import grpc_receiver
from support.service import Service, simulated, until_health
from support.traced_calls import (
    STYLES,
    WHOLE,
    Expected,
    TracedCall,
    cancelled_after,
    check_traces,
    request,
    until_listed,
)

HEALTH = health_pb2.HealthCheckResponse
COST = {"step_s": 0.02, "prefill_token_s": 0.0, "decode_slot_s": 0.0, "context_token_s": 0.0}
OPTIONS = (
    *simulated(cost=COST),
    *("--fronts", "1", "--max-num-seqs", "3", "--max-num-waiting", "4"),
    *("--max-backlog-tokens", "128", "--max-reader-stall-s", "0.3", "--drain-grace-s", "3"),
    *("--max-replays", "0"),
)
# A stream window as small as the protocol's default, and no growing of it.
SMALL_WINDOW = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.use_local_subchannel_pool", 1),
)
# A service that ends has a second for the traces that are left.
OFTEN = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
LONG = 900  # tokens, about eighteen seconds of them
PREPARED = ("prepare",)


@dataclass
class Site:
    """A service, and the expected trace of every request sent to it."""

    service: Service
    operations: OperationsClient
    channel: grpc.aio.Channel
    expected: dict[str, tuple[TracedCall, Expected]] = field(
        default_factory=dict[str, tuple[TracedCall, Expected]]
    )

    def call(
        self,
        name: str,
        style: str,
        message: pb.GenerateRequest | bytes,
        wanted: Expected,
        **how: Any,
    ) -> TracedCall:
        """Send a request and record its expected trace."""
        call = TracedCall(how.pop("channel", self.channel), style, message, **how)
        self.expected[f"{name}, {style}"] = (call, wanted)
        return call

    async def ask(
        self,
        name: str,
        style: str,
        message: pb.GenerateRequest | bytes,
        wanted: Expected,
        **how: Any,
    ) -> TracedCall:
        """Send a request and check its status."""
        call = self.call(name, style, message, wanted, **how)
        assert await call.outcome() == wanted.code, f"{name}, {style}"
        return call

    async def running(self, name: str, style: str, wanted: Expected, num: int) -> list[TracedCall]:
        """Send `num` requests; return them once all run."""
        calls = [
            self.call(f"{name}, running {number}", style, request(LONG, (9, number)), wanted)
            for number in range(num)
        ]
        await until_listed(self.operations, calls, RequestState.PROCESSING)
        return calls


CANCELLED = Expected("CANCELLED")


async def ok(site: Site, style: str) -> None:
    await site.ask("ok", style, request(), Expected("OK", "", WHOLE))


async def stop_string(site: Site, style: str) -> None:
    told = await site.ask("the text", style, request(20), Expected("OK", "", WHOLE))
    message = request(20)
    message.stopping.stop_strings.append(told.text[8:11])
    finish = {"": {keys.RESPONSE_FINISH_REASONS: ("stop",)}}
    await site.ask("stop string", style, message, Expected("OK", "", WHOLE, finish))


async def client_cancels(site: Site, style: str) -> None:
    (call,) = await site.running("left", style, Expected("CANCELLED"), 1)
    call.call.cancel()
    assert await call.outcome() == "CANCELLED"


async def cancel_rpc(site: Site, style: str) -> None:
    finish = {"": {keys.RESPONSE_FINISH_REASONS: ("cancelled",)}}
    (call,) = await site.running("cancelled", style, Expected("OK", "", None, finish), 1)
    stub = pb_grpc.GenerationServiceStub(site.channel)
    await stub.Cancel(pb.CancelRequest(request_id=call.request_id))
    assert await call.outcome() == "OK"


async def grpc_deadline(site: Site, style: str) -> None:
    # The engine's end and gRPC's come at the same moment; only the former is delivered.
    wanted = Expected("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", WHOLE[:-1], or_children=WHOLE)
    await site.ask("deadline of the call", style, request(LONG), wanted, timeout_s=1.5)


async def deadline_in_the_queue(site: Site, style: str) -> None:
    blockers = await site.running("before a deadline", style, CANCELLED, 3)
    async with cancelled_after(blockers):
        message = request()
        message.scheduling.total_timeout.FromMilliseconds(1000)
        why = {"queue": {keys.QUEUE_REASON: "slots", keys.QUEUE_OUTCOME: "deadline"}}
        wanted = Expected("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", None, why)
        await site.ask("deadline in the queue", style, message, wanted)


async def queue_full(site: Site, style: str) -> None:
    blockers = await site.running("before a full queue", style, CANCELLED, 3)
    why = {"queue": {keys.QUEUE_REASON: "slots", keys.QUEUE_OUTCOME: "cancelled"}}
    waited = Expected("CANCELLED", "", None, why)
    waiting = [
        site.call(f"waits {number}", style, request(LONG, (8, number)), waited)
        for number in range(4)
    ]
    async with cancelled_after([*blockers, *waiting]):
        await until_listed(site.operations, waiting, RequestState.PENDING)
        await site.ask("queue full", style, request(), Expected("RESOURCE_EXHAUSTED", "QUEUE_FULL"))


async def invalid_field(site: Site, style: str) -> None:
    message = request()
    message.sampling.temperature = -1.0
    wanted = Expected("INVALID_ARGUMENT", "INVALID_ARGUMENT", PREPARED)
    await site.ask("invalid field", style, message, wanted)


async def malformed(site: Site, style: str) -> None:
    if style == "Multiplex":
        return  # bytes that are no command are no request
    wanted = Expected("INVALID_ARGUMENT", "MALFORMED_REQUEST", PREPARED)
    await site.ask("malformed", style, b"\x0a\xff\xff\xff\x7fno message", wanted)


async def unknown_model(site: Site, style: str) -> None:
    message = request()
    message.model = "nobody"
    wanted = Expected("NOT_FOUND", "MODEL_NOT_FOUND", PREPARED)
    await site.ask("unknown model", style, message, wanted)


async def duplicate_id(site: Site, style: str) -> None:
    first = await site.running("before its double", style, CANCELLED, 1)
    async with cancelled_after(first):
        message = request()
        message.request_id = first[0].request_id
        wanted = Expected("ALREADY_EXISTS", "REQUEST_ID_IN_USE", PREPARED)
        await site.ask("duplicate id", style, message, wanted)


async def stalled_reader(site: Site, style: str) -> None:
    if style == "GenerateOnce":
        return  # its one message is not written before its end
    message = request(LONG)
    message.output.return_token_ids = True
    message.output.logprobs = 20
    wanted = Expected("RESOURCE_EXHAUSTED", "READER_STALLED")
    async with grpc.aio.insecure_channel(site.service.address, options=SMALL_WINDOW) as channel:
        how: dict[str, Any] = {"credit": 0} if style == "Multiplex" else {}
        call = site.call("stalled", style, message, wanted, channel=channel, **how)
        if style == "Generate":
            named = (f"request={call.request_id}", f"trace={call.trace_id.hex()}")
            await site.service.until_logged("stalled reader disconnected", *named)
        assert await call.outcome() == wanted.code


ENDS: tuple[Callable[[Site, str], Awaitable[None]], ...] = (
    ok,
    stop_string,
    client_cancels,
    cancel_rpc,
    grpc_deadline,
    deadline_in_the_queue,
    queue_full,
    invalid_field,
    malformed,
    unknown_model,
    duplicate_id,
    stalled_reader,
)


async def kill_the_engine(site: Site) -> None:
    wanted = Expected("UNAVAILABLE", "ENGINE_DOWN")
    calls = [call for style in STYLES for call in await site.running("killed", style, wanted, 1)]
    waited = Expected("UNAVAILABLE", "ENGINE_DOWN", ("prepare", "queue", "deliver"))
    calls.append(site.call("killed, waiting", "Generate", request(), waited))
    await until_listed(site.operations, calls[-1:], RequestState.PENDING)
    os.kill(await site.service.next_pid("engine"), signal.SIGKILL)
    assert [await call.outcome() for call in calls] == ["UNAVAILABLE"] * len(calls)
    await site.service.next_pid("engine")
    await until_health(site.channel, HEALTH.SERVING)


async def drain(site: Site) -> None:
    wanted = Expected("UNAVAILABLE", "DRAINING")
    calls = [call for style in STYLES for call in await site.running("drained", style, wanted, 1)]
    site.service.signal(signal.SIGTERM)
    await until_health(site.channel, HEALTH.NOT_SERVING)
    refused = Expected("UNAVAILABLE", "DRAINING", PREPARED)
    for style in STYLES[:2]:
        await site.ask("refused in a drain", style, request(), refused)
    assert [await call.outcome() for call in calls] == ["UNAVAILABLE"] * len(calls)
    assert await site.service.ended() == 0


async def test_whatever_becomes_of_a_request_it_is_one_trace() -> None:
    with grpc_receiver() as collector:
        arguments = (*OPTIONS, "--deadline-admission", "off", "--otlp-endpoint", collector.endpoint)
        async with (
            observed(*arguments, environment=OFTEN) as (service, operations),
            service.channel() as channel,
        ):
            site = Site(service, operations, channel)
            for end in ENDS:
                for style in STYLES:
                    await end(site, style)
            await kill_the_engine(site)
            await drain(site)
        check_traces(collector.spans(), site.expected)


@pytest.mark.parametrize("style", STYLES)
async def test_one_that_cannot_meet_its_deadline_is_one_trace(style: str) -> None:
    prices = '{"step_s": 0.02, "prefill_token_s": 0, "decode_slot_s": 0, "context_token_s": 0}'
    with grpc_receiver() as collector:
        arguments = (*OPTIONS, "--step-cost", prices, "--otlp-endpoint", collector.endpoint)
        async with (
            observed(*arguments, environment=OFTEN) as (service, operations),
            service.channel() as channel,
        ):
            site = Site(service, operations, channel)
            # No client is refused by prices that no step has borne out.
            await site.ask("before", style, request(40), Expected("OK", "", WHOLE))
            message = request(LONG)
            message.stopping.min_tokens = LONG
            message.scheduling.total_timeout.FromMilliseconds(4000)
            wanted = Expected("DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE")
            await site.ask("unreachable", style, message, wanted)
            for call, _ in site.expected.values():
                root = frozenset({f"penstock.v1.GenerationService/{style}"})
                await asyncio.to_thread(collector.wait_for_names, call.trace_id.hex(), root)
            service.signal(signal.SIGTERM)
            assert await service.ended() == 0
        check_traces(collector.spans(), site.expected)
