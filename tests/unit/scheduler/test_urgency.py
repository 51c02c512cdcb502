"""Which prompt gets the whole prefill budget if prompts that share it would be late, and which
requests are not admitted meanwhile.
"""

from typing import Any

from penstock.scheduler.events import Completed
from unit.scheduler.fixed_cost_engine import FixedCostEngine

LONG = 400
"""Prompt tokens: 440 ms with whole steps, a third more if another prompt gets its share."""


def site_of(**config: Any) -> FixedCostEngine:
    return FixedCostEngine(max_prefill_share=0.5, **config)


def test_a_prompt_that_would_be_late_gets_the_whole_budget() -> None:
    site = site_of()
    site.submit(1, 2 * LONG, max_tokens=1, ttft_deadline_s=0.95)
    site.step()
    site.submit(2, LONG, max_tokens=1)
    site.run()
    assert isinstance(site.ends[1], Completed)
    assert isinstance(site.ends[2], Completed)


def test_the_prompt_with_the_earlier_deadline_is_computed_first() -> None:
    site = site_of()
    site.submit(1, LONG, max_tokens=1, ttft_deadline_s=1.1)
    site.step()
    site.submit(2, LONG, max_tokens=1, ttft_deadline_s=0.8)
    site.run()
    assert isinstance(site.ends[1], Completed)
    assert isinstance(site.ends[2], Completed)
    assert site.ends[2].at_s < site.ends[1].at_s


def test_prompts_share_steps_while_deadlines_permit() -> None:
    site = site_of()
    site.submit(1, LONG, max_tokens=1, ttft_deadline_s=5.0)
    site.step()
    site.submit(2, 20, max_tokens=1)
    site.step()
    site.step()
    assert isinstance(site.ends[2], Completed)


def test_no_request_waits_for_one_of_a_lower_class() -> None:
    site = site_of()
    site.submit(1, LONG, max_tokens=1, ttft_deadline_s=0.5)
    site.step()
    site.submit(2, LONG, max_tokens=1, priority=1)
    site.step()
    assert 2 in site.admitted


def test_others_have_their_share_in_one_step_of_the_stride() -> None:
    site = site_of(aging_stride=3)
    other = site.submit(1, 3 * LONG, max_tokens=1)
    assert other is not None
    site.step()
    site.submit(2, LONG, max_tokens=1, ttft_deadline_s=0.9)
    num_computed = site.engine.arrays.num_computed
    had_some: list[bool] = []
    while 2 not in site.ends:
        num_before = int(num_computed[other.slot])
        site.step()
        had_some.append(int(num_computed[other.slot]) > num_before)
    assert isinstance(site.ends[2], Completed)
    assert False in had_some, "it was urgent for some steps"
    assert all(any(had_some[at : at + 3]) for at in range(len(had_some) - 2))


def test_a_request_predicted_late_behind_earlier_deadlines_is_not_admitted() -> None:
    site = site_of()
    for key in (1, 2):
        site.submit(key, LONG, max_tokens=1, ttft_deadline_s=0.9)
    site.step()
    # 770 ms of prompts that are due before it, and 220 its own ms.
    site.submit(3, LONG // 2, max_tokens=1, ttft_deadline_s=0.8)
    site.run()
    assert isinstance(site.ends[1], Completed)
    assert isinstance(site.ends[2], Completed)
    assert 3 not in site.admitted
