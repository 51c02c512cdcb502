"""The trace context of a request record, and the content that a record has only if capture is
enabled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from penstock.scheduler.request import FailureReason
from penstock.server.front.config import FrontConfig
from penstock.server.observe.request_record import RequestRecord
from penstock.server.text.model_text import ModelText
from penstock.v1 import generation_service_pb2 as pb
from support.calls import STYLES, Call
from support.fronts import SMALL_WINDOW, ServedFront
from support.generate_requests import text_request
from support.record_log import RecordLog, check_tiling, kinds, logged, run_to_end
from support.timeout import TEST_TIMEOUT_S


@pytest.fixture
async def site(text: ModelText) -> AsyncIterator[tuple[ServedFront, RecordLog]]:
    async with logged(text) as site:
        yield site


@pytest.mark.parametrize("is_traced", [True, False])
async def test_trace_context_is_read_and_returned(text: ModelText, is_traced: bool) -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    metadata = (("traceparent", f"00-{trace_id}-{span_id}-01"), ("tracestate", "a=1"))
    async with logged(text, is_tracing=is_traced) as (served, log):
        call = Call(served.channel, "Generate", text_request(), metadata=metadata)
        (spec,) = await served.port.next_submission()
        await run_to_end(served, spec.key)
        await call.outcome()
        assert dict(await call.call.initial_metadata()) == {}
        trace = (await log.next()).trace
        if not is_traced:
            assert (trace.trace_id, spec.trace_id) == (b"", b"")
            assert call.trace_id == ""
            return
        assert spec.trace_id.hex() == trace.trace_id.hex() == trace_id
        assert trace.parent_span_id.hex() == span_id
        assert trace.is_parent_sampled is True
        assert trace.trace_state == "a=1"
        assert call.trace_id == trace_id


@pytest.mark.parametrize(
    "metadata",
    [
        (("traceparent", "canary"),),
        (("traceparent", "00-" + "0" * 32 + "-" + "1" * 16 + "-01"),),
        (("traceparent", "x" * 4000),),
        (("tracestate", "a=1"),),
    ],
)
async def test_a_bad_context_begins_a_trace_and_fails_no_call(
    site: tuple[ServedFront, RecordLog], metadata: tuple[tuple[str, str], ...]
) -> None:
    served, log = site
    call = Call(served.channel, "Generate", text_request(), metadata=metadata)
    await run_to_end(served, await served.port.next_key())
    assert await call.outcome() == "OK"
    trace = (await log.next()).trace
    assert trace.parent_span_id == b""
    assert trace.is_parent_sampled is None
    assert trace.trace_state == ""
    assert any(trace.trace_id)


async def test_a_rejection_names_its_trace_and_precedes_any_header(text: ModelText) -> None:
    async with logged(text, FrontConfig(acceptance_delay_s=60.0)) as (served, log):
        call = Call(served.channel, "Generate", text_request())
        served.port.fail(await served.port.next_key(), FailureReason.QUEUE_FULL)
        await call.outcome()
        trailers = dict(await call.call.trailing_metadata())
        assert trailers["x-trace-id"] == (await log.next()).trace.trace_id.hex()
        # After initial metadata, gRPC would not retry the call transparently.
        assert "x-trace-id" not in dict(await call.call.initial_metadata())


async def test_a_stalled_reader_is_reported_in_its_record(text: ModelText) -> None:
    config = FrontConfig(acceptance_delay_s=0.0, max_backlog_tokens=64)
    async with logged(text, config, channel_options=SMALL_WINDOW) as (served, log):
        call = served.stub.Generate(text_request())
        key = await served.port.next_key()
        served.port.admit(key)
        await asyncio.wait_for(call.read(), TEST_TIMEOUT_S)
        letters = served.encode("abcdefgh") * 16
        while (
            served.server.num_live_requests
            and not served.server.front.counters.num_disconnected_readers
        ):
            served.port.emit(tokens=[(key, letter) for letter in letters])
            await asyncio.sleep(0)
        call.cancel()
        record = await log.next()
    assert (record.code, record.reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED.value[0],
        "READER_STALLED",
    )
    assert kinds(record)[-1] == "deliver"
    assert record.num_messages > 0
    check_tiling(record)


async def test_other_methods_have_no_record(site: tuple[ServedFront, RecordLog]) -> None:
    served, log = site
    with pytest.raises(grpc.aio.AioRpcError):
        await served.stub.Cancel(pb.CancelRequest(request_id="nobody"))
    with pytest.raises(grpc.aio.AioRpcError):
        await served.stub.Cancel(pb.CancelRequest())
    assert log.records == []
    assert log.recorder.outcomes() == ()


def content_of(record: RequestRecord) -> tuple[str, tuple[str, ...]]:
    assert record.content is not None
    return record.content.prompt, record.content.outputs


@pytest.mark.parametrize("style", STYLES[:2])
async def test_content_is_recorded_if_capture_is_enabled(text: ModelText, style: str) -> None:
    config = FrontConfig(acceptance_delay_s=0.0, has_content=True)
    async with logged(text, config) as (served, log):
        message = text_request("x" * 400)
        message.sampling.num_outputs = 2
        call = Call(served.channel, style, message)
        leader, other = await served.port.next_submission()
        for key in (leader.key, other.key):
            served.port.admit(key)
        served.port.send(leader.key, served.encode("abc"))
        served.port.send(other.key, served.encode("de"))
        served.port.finish(leader.key)
        served.port.finish(other.key)
        assert await call.outcome() == "OK"
        assert content_of(await log.next()) == ("x" * 400, ("abc", "de"))


async def test_by_default_a_record_contains_no_content(
    site: tuple[ServedFront, RecordLog],
) -> None:
    served, log = site
    message = text_request("canaryprompt")
    message.stopping.stop_strings.append("canarystop")
    message.cache.salt = "canarysalt"
    message.cache.session_id = "canarysession"
    call = Call(
        served.channel, "Generate", message, metadata=(("authorization", "Bearer canarykey"),)
    )
    key = await served.port.next_key()
    served.port.admit(key)
    served.port.send(key, served.encode("canaryoutput canarystop"))
    await call.outcome()
    record = await log.next()
    assert record.finish_reasons == ("STOP",)
    rejected = text_request("canaryprompt", model="canarymodel")
    await Call(served.channel, "Generate", rejected).outcome()
    await log.next()
    # Neither as text nor as token ids.
    prompt_ids = served.encode("canaryprompt")
    assert all(b"canary" not in data for data in log.data)
    assert all(str(prompt_ids).encode() not in data for data in log.data)
