"""Live requests over OperationsService: lists with filters and pages, and single requests. No
response contains the content of a request.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc

from penstock.v1 import operations_service_pb2 as pb
from penstock.v1 import state_pb2, stats_pb2
from support.operations_server import ServedOperations, rejection
from support.snapshots import NOW_UNIX_S, numbered, request_view, waiting_view


async def test_live_requests_are_listed_with_everything_but_content(
    operations: ServedOperations,
) -> None:
    operations.fake.requests = (
        request_view(1, time_to_deadline_s=1.5, num_preemptions=2),
        waiting_view(2, queue_position=4),
    )
    response = await operations.stub.ListLiveRequests(pb.ListLiveRequestsRequest())
    running, waiting = response.requests

    assert response.next_page_token == ""
    assert (running.request_id, running.tenant, running.model) == ("request-1", "acme", "tiny")
    assert running.state == state_pb2.REQUEST_STATE_PROCESSING
    assert running.phase == stats_pb2.REQUEST_PHASE_DECODE
    assert (running.usage.num_prompt_tokens, running.usage.num_cached_prompt_tokens) == (96, 32)
    assert running.usage.num_completion_tokens == 17
    assert running.timings.queue_duration.ToMilliseconds() == 1000
    assert running.timings.prefill_duration.ToMilliseconds() == 500
    assert running.timings.ttft_duration.ToMilliseconds() == 1750
    assert running.timings.decode_duration.ToMilliseconds() == 99_000 - 1750
    assert running.timings.total_duration.ToMilliseconds() == 99_000
    assert running.remaining_duration.ToMilliseconds() == 1500
    assert (running.num_preemptions, running.num_backlog_tokens) == (2, 2)
    assert running.arrival_time.ToSeconds() == NOW_UNIX_S - 99
    assert [change.phase for change in running.history] == [1, 2, 3, 4]
    assert not running.HasField("queue_position")
    assert waiting.queue_position == 4
    assert waiting.wait_reason == state_pb2.WAIT_REASON_BLOCKS
    assert not waiting.HasField("remaining_duration")


async def test_lists_are_filtered(operations: ServedOperations) -> None:
    operations.fake.requests = (request_view(1), waiting_view(2, tenant="b"), request_view(3))
    stub = operations.stub

    async def ids(**filters: Any) -> list[str]:
        response = await stub.ListLiveRequests(pb.ListLiveRequestsRequest(**filters))
        return [request.request_id for request in response.requests]

    assert await ids(tenant="b") == ["request-2"]
    assert await ids(tenant="") == []
    assert await ids(state=state_pb2.REQUEST_STATE_PROCESSING) == ["request-1", "request-3"]
    assert await ids(model="tiny", state=state_pb2.REQUEST_STATE_PENDING) == ["request-2"]


async def test_pages_are_complete_while_requests_start_and_end(
    operations: ServedOperations,
) -> None:
    operations.fake.requests = numbered(250)
    seen: list[str] = []
    token = ""
    for _ in range(10):
        page = await operations.stub.ListLiveRequests(pb.ListLiveRequestsRequest(page_token=token))
        seen += [request.request_id for request in page.requests]
        token = page.next_page_token
        if not token:
            break
        # The last request of the page ends, and a new one arrives.
        operations.fake.requests = (
            *(view for view in operations.fake.requests if view.request_id != seen[-1]),
            request_view(1000 + len(seen)),
        )

    assert seen[:250] == [f"request-{number}" for number in range(250)]
    assert len(seen) == len(set(seen)) == 252


async def test_a_page_continues_after_the_clock_was_set(
    operations: ServedOperations,
) -> None:
    operations.fake.requests = numbered(4)
    first = await operations.stub.ListLiveRequests(pb.ListLiveRequestsRequest(page_size=2))
    operations.fake.requests = tuple(
        dataclasses.replace(view, arrival_s=view.arrival_s + 3600) for view in numbered(4)
    )
    rest = await operations.stub.ListLiveRequests(
        pb.ListLiveRequestsRequest(page_size=2, page_token=first.next_page_token)
    )

    assert [request.request_id for request in rest.requests] == ["request-2", "request-3"]


async def test_a_token_of_another_list_is_rejected(operations: ServedOperations) -> None:
    operations.fake.requests = numbered(5)
    page = await operations.stub.ListLiveRequests(pb.ListLiveRequestsRequest(page_size=2))
    token = page.next_page_token

    other = await rejection(
        operations.stub.ListLiveRequests(
            pb.ListLiveRequestsRequest(page_token=token, tenant="acme")
        )
    )
    forged = await rejection(
        operations.stub.ListLiveRequests(pb.ListLiveRequestsRequest(page_token="A" + token[1:]))
    )
    assert other.fields == forged.fields == ["page_token"]


async def test_one_request_is_found_by_id_and_tenant(operations: ServedOperations) -> None:
    operations.fake.requests = (
        request_view(1, request_id="same", tenant="a"),
        request_view(2, request_id="same", tenant="b"),
        request_view(3),
    )
    stub = operations.stub

    found = await stub.GetLiveRequest(pb.GetLiveRequestRequest(request_id="request-3"))
    assert found.request.request_id == "request-3"
    found = await stub.GetLiveRequest(pb.GetLiveRequestRequest(request_id="same", tenant="b"))
    assert found.request.tenant == "b"
    error = await rejection(stub.GetLiveRequest(pb.GetLiveRequestRequest(request_id="same")))
    assert (error.code, error.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["tenant"])
    for missing in (
        pb.GetLiveRequestRequest(request_id="nobody"),
        pb.GetLiveRequestRequest(request_id="same", tenant="c"),
    ):
        error = await rejection(stub.GetLiveRequest(missing))
        assert (error.code, error.info.reason) == (
            grpc.StatusCode.NOT_FOUND,
            "REQUEST_NOT_FOUND",
        )
        assert error.request_id == missing.request_id
