"""Which load counts when a deadline is predicted for a tenant under its share, and when its request
is rejected.
"""

from typing import Any

import pytest

from penstock.scheduler.config import AdmissionPolicy
from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.request import FailureReason
from unit.scheduler.fixed_cost_engine import FixedCostEngine


def flooded(num_prompts: int = 4, **options: Any) -> FixedCostEngine:
    """Return an engine in which one tenant has all four slots. The request in the last slot is
    still in prefill; the tenant's other `num_prompts - 4` requests wait.
    """
    site = FixedCostEngine(**options)
    for key in range(1, num_prompts + 1):
        site.submit(key, 300, max_tokens=100, tenant="flood")
    while len(site.engine.running) < 4:
        site.step()
    return site


@pytest.mark.parametrize("num_prompts", [4, 40])
def test_a_tenant_under_its_share_is_not_rejected_for_the_queue_of_others(
    num_prompts: int,
) -> None:
    site = flooded(num_prompts)
    # 330 ms alone.
    site.submit(100, 300, max_tokens=1, tenant="quiet", ttft_deadline_s=0.5)
    site.run_until(site.clock() + 0.5)
    site.step()
    assert isinstance(site.ends[100], Completed)
    reported = site.queued[100][0]
    assert reported.num_ahead == 0
    assert reported.estimated_queue_s is not None
    assert reported.estimated_queue_s < 0.1


def test_a_request_of_the_flooding_tenant_is_rejected() -> None:
    site = flooded()
    site.submit(100, 300, max_tokens=1, tenant="flood", ttft_deadline_s=0.5)
    site.step()
    assert site.failure(100).reason is FailureReason.TTFT_DEADLINE_UNREACHABLE


def test_earlier_requests_of_a_tenant_under_its_share_count() -> None:
    site = flooded(40)
    for key in (100, 101):
        site.submit(key, 300, max_tokens=1, tenant="quiet", ttft_deadline_s=5.0)
    site.submit(102, 300, max_tokens=1, tenant="quiet", ttft_deadline_s=5.0)
    site.step()
    assert site.queued[102][0].num_ahead >= 2


def test_without_preemption_a_tenant_under_its_share_waits_for_a_slot() -> None:
    site = flooded(40, admission_policy=AdmissionPolicy.GUARANTEED_NO_EVICT)
    site.submit(100, 300, max_tokens=1, tenant="quiet", ttft_deadline_s=0.5)
    site.step()
    assert isinstance(site.ends[100], Failed)


def test_a_share_counts_all_the_blocks_that_a_tenant_will_hold() -> None:
    site = FixedCostEngine(num_seqs=16, max_num_running_per_tenant=7)
    for key in range(1, 21):
        site.submit(key, 300, max_tokens=300, tenant="flood")
    site.submit(100, 600, max_tokens=300, tenant="quiet", hashed=True)
    while len(site.engine.running) < 8 or site.engine.running.num_prefilling:
        site.step()
    # It shares all but the last of its blocks, which count for each holder: twice the blocks of
    # both, about 60, is more than the 105 or so of the others.
    site.submit(101, 601, max_tokens=1, tenant="quiet", hashed=True)
    site.step()
    assert site.queued[101][0].num_ahead > 0
