"""Deadlines, quotas and tenants of a real `penstock serve`, as clients observe them.

Steps take 20 ms, as in the service's cost model, and one request runs at a time. On a busy machine
step times are irregular: then the service predicts nothing, and the clients of these tests retry.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn

import pytest
import pytest_asyncio

from penstock.client import (
    Accepted,
    Client,
    DeadlineUnreachable,
    Event,
    Progress,
    QuotaExceeded,
    RequestNotFound,
    RequestState,
    RetryPolicy,
)
from support.service import Service, simulated, started
from support.timeout import TEST_TIMEOUT_S

STEP_S = 0.02
COST = f'{{"step_s": {STEP_S}, "prefill_token_s": 0, "decode_slot_s": 0, "context_token_s": 0}}'
KEY = "x-tenant"
LONG = 6000  # tokens, two minutes of them: longer than any test sends again
PROMPT = "What is a penstock?"


async def no_sleep(duration_s: float) -> NoReturn:
    raise AssertionError(f"the call is tried again after {duration_s} s")


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[Service]:
    """Provide one service; each test has its own tenants."""
    async with started(
        *simulated(STEP_S),
        *("--fronts", "1", "--max-num-seqs", "1", "--step-cost", COST),
        *("--max-seq-len", "8192"),
        *("--tenant-metadata-key", KEY, "--tenant-weights", "gold=4"),
        *("--max-num-waiting-per-tenant", "1"),
    ) as service:
        async with client_of(service, "early") as client:
            # Enough steps that the service uses its cost model for predictions.
            for _ in range(8):
                await client.generate_once(PROMPT, max_tokens=5, ignore_eos=True)
        yield service


def client_of(service: Service, tenant: str, *, max_attempts: int = 4) -> Client:
    return Client(
        service.address,
        metadata=((KEY, tenant),),
        retry=RetryPolicy(max_attempts=max_attempts),
        sleep=no_sleep,
    )


@asynccontextmanager
async def asked(client: Client, *, num_tokens: int = LONG) -> AsyncGenerator[AsyncIterator[Event]]:
    """Start a generation of exactly `num_tokens` tokens; cancel it at the end of the block."""
    events = client.generate(PROMPT, max_tokens=num_tokens, ignore_eos=True)
    try:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            yield events
    finally:
        await events.aclose()


async def until_running(events: AsyncIterator[Event]) -> None:
    async for event in events:
        if isinstance(event, Progress) and event.state is RequestState.PROCESSING:
            return
    raise AssertionError("the stream ended early")


async def test_a_total_deadline_below_the_shortest_answer_is_rejected_at_once(
    service: Service,
) -> None:
    async with client_of(service, "a") as client, asked(client) as running:
        await until_running(running)
        options = {"max_tokens": LONG, "ignore_eos": True, "total_timeout_s": 4.0}
        error = await rejected_for_its_deadline(client, **options)
        # With irregular step times there is a retry delay: later it might be in time.
        while error.retry_after_s is not None:
            error = await rejected_for_its_deadline(client, **options)
        assert error.deadline_s == 4.0
        assert error.estimate_s is not None
        assert error.estimate_s > 4.0
        assert error.metadata["deadline"] == "total"
        assert (error.metadata["state"], error.metadata["phase"]) == ("PENDING", "queue")


async def cancelled(client: Client, accepted: Accepted, events: AsyncIterator[Event]) -> None:
    """Cancel the request and read its stream to the end, so that it is in no queue."""
    with contextlib.suppress(RequestNotFound):  # it has been rejected
        await client.cancel(accepted.request_id)
    await read_out(events)


async def read_out(events: AsyncIterator[Event]) -> None:
    async for _ in events:
        pass


async def rejected_for_its_deadline(client: Client, **options: Any) -> DeadlineUnreachable:
    """Send requests until one is rejected for its deadline: while step times are irregular, nothing
    is predicted.
    """
    async with asyncio.timeout(TEST_TIMEOUT_S):
        while True:
            events = client.generate(PROMPT, **options)
            async with aclosing(events):
                try:
                    accepted = await anext(events)
                    assert isinstance(accepted, Accepted)
                    # A front may also accept a request before its engine has answered.
                    await cancelled(client, accepted, events)
                except DeadlineUnreachable as error:
                    return error


async def accepted_with_estimate(client: Client) -> Accepted:
    """Send requests until the wait of one is predicted. Prediction requires regular step times."""
    async with asyncio.timeout(TEST_TIMEOUT_S):
        while True:
            events = client.generate(PROMPT, max_tokens=LONG, ignore_eos=True)
            async with aclosing(events):
                accepted = await anext(events)
                assert isinstance(accepted, Accepted)
                await cancelled(client, accepted, events)
                if accepted.estimated_queue_s is not None:
                    return accepted


async def test_a_request_that_waits_is_given_an_estimate(service: Service) -> None:
    async with client_of(service, "a") as client, asked(client) as running:
        await until_running(running)
        accepted = await accepted_with_estimate(client)
        assert accepted.estimated_queue_s is not None
        assert accepted.estimated_queue_s > 0


async def test_a_first_token_that_would_come_too_late_is_rejected_at_once(
    service: Service,
) -> None:
    async with client_of(service, "late") as client, asked(client) as running:
        await until_running(running)
        error = await rejected_for_its_deadline(client, max_tokens=5, ttft_timeout_s=2.0)
        assert error.metadata["deadline"] == "ttft"
        assert error.deadline_s == 2.0
        assert error.estimate_s is not None
        assert error.estimate_s > 2.0
        assert error.retry_after_s is not None


async def test_a_tenant_over_its_part_of_the_queue_is_rejected_and_the_others_are_not(
    service: Service,
) -> None:
    async with (
        client_of(service, "large", max_attempts=1) as a,
        client_of(service, "small") as b,
        asked(a) as running,
    ):
        await until_running(running)
        async with asked(a) as waiting:
            assert isinstance(await anext(waiting), Accepted)
            async with asked(a) as third:
                # A front may accept the request before its engine has answered.
                with pytest.raises(QuotaExceeded) as caught:
                    await read_out(third)
            assert caught.value.retry_after_s is not None
            async with asked(b) as other:
                assert isinstance(await anext(other), Accepted)


async def test_two_tenants_may_use_one_id_and_cancel_their_own(service: Service) -> None:
    async with client_of(service, "our") as a, client_of(service, "their") as b:
        ours = a.generate(PROMPT, request_id="same", max_tokens=LONG, ignore_eos=True)
        theirs = b.generate(PROMPT, request_id="same", max_tokens=LONG, ignore_eos=True)
        async with asyncio.timeout(TEST_TIMEOUT_S):
            assert isinstance(await anext(ours), Accepted)
            assert isinstance(await anext(theirs), Accepted)
            await b.cancel("same")
            *_, end = [event async for event in theirs]
            assert end.sequence > 0
            await until_running(ours)
            await a.cancel("same")
            assert [event async for event in ours]
