from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import grpc
import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.server.front.admission_estimate import AdmissionEstimate
from penstock.server.front.config import FrontConfig
from penstock.server.text.model_text import ModelText
from support.overload_calls import Calls, fill_slots
from support.published_queue import PublishedQueue
from support.stepped_service import SteppedService, another_front, request, stepped

MAX_WAITING = 32
KEY = "x-tenant"


@pytest.fixture
async def service(text: ModelText) -> AsyncIterator[SteppedService]:
    scheduler = SchedulerConfig(max_num_waiting=MAX_WAITING)
    front = FrontConfig(tenant_metadata_key=KEY)
    async with stepped(text, front=front, scheduler=scheduler) as service:
        yield service


def live_of(service: SteppedService) -> Counter[str]:
    """Return the number of the engine's requests, queued or running, by tenant."""
    return Counter(live.spec.tenant for live in service.engine.requests.values())


async def until_live(service: SteppedService, tenant: str, count: int) -> None:
    """Wait until the engine has `count` requests of `tenant`; then run a step, which reports the
    displaced requests.
    """

    def is_so() -> bool:
        service.read_commands()
        return live_of(service)[tenant] == count

    await service.until(is_so)
    service.step()


async def test_requests_of_the_tenant_with_the_longest_queue_are_displaced_across_fronts(
    service: SteppedService,
) -> None:
    """One tenant floods one front; the other tenants use the other front, which does not see the
    flood.
    """
    shown = PublishedQueue(service.engine)
    flood, quiet = Calls(), Calls()
    async with another_front(service, tenant_metadata_key=KEY) as other:
        for each in (service, other):
            each.front.admission = AdmissionEstimate(shown.view, 2, waiting=each.front.table)
        await fill_slots(service, Calls(), 8, 400)
        for _ in range(2):
            shown.publish()  # what was sent is seen by now
        for _ in range(MAX_WAITING):
            flood.send(service, request(), "hog")
        await service.until_live(8 + MAX_WAITING)
        shown.publish()
        for tenant in ("a", "b"):
            for num in (1, 2, 3):
                quiet.send(other, request(), tenant)
                await until_live(service, tenant, num)
                shown.publish()
        await service.until(lambda: len(flood.done) == 6)

        assert live_of(service) == {"": 8, "hog": MAX_WAITING - 6, "a": 3, "b": 3}
        assert not quiet.rejected
        assert {error.code for error in flood.rejected} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        flood.send(service, request(), "hog")
        await service.until(lambda: len(flood.done) == 7)
        assert live_of(service) == {"": 8, "hog": MAX_WAITING - 6, "a": 3, "b": 3}
