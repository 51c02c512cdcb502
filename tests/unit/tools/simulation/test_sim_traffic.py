"""Synthetic traffic and transformed traces are reproducible from their seed, and keep the
configured shares.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from penstock.scheduler.setting import SettingError
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.synthetic import (
    ArrivalProcess,
    SyntheticConfig,
    TenantShare,
    synthetic_trace,
)
from penstock.tools.simulation.transform import TransformConfig, transformed


def request(arrival_s: float, **fields: Any) -> TraceRequest:
    values: dict[str, Any] = {"num_prompt_tokens": 100, "num_output_tokens": 10} | fields
    return TraceRequest(arrival_s=arrival_s, **values)


@pytest.mark.parametrize("arrivals", list(ArrivalProcess))
def test_the_same_seed_gives_the_same_trace(arrivals: ArrivalProcess) -> None:
    config = SyntheticConfig(arrivals=arrivals, duration_s=100.0, seed=3)
    other = SyntheticConfig(arrivals=arrivals, duration_s=100.0, seed=4)

    assert list(synthetic_trace(config)) == list(synthetic_trace(config))
    assert list(synthetic_trace(config)) != list(synthetic_trace(other))


@pytest.mark.parametrize("arrivals", list(ArrivalProcess))
def test_the_arrival_rate_is_as_configured(arrivals: ArrivalProcess) -> None:
    config = SyntheticConfig(
        arrivals=arrivals, rate_per_s=5.0, duration_s=4000.0, burstiness=3.0, mean_state_s=10.0
    )

    requests = list(synthetic_trace(config))

    assert len(requests) == pytest.approx(20_000, rel=0.1)
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(requests))
    assert requests[-1].arrival_s < 4000.0


def test_bursts_are_burstier_than_poisson() -> None:
    def variation(arrivals: ArrivalProcess) -> float:
        config = SyntheticConfig(arrivals=arrivals, rate_per_s=10.0, duration_s=2000.0)
        gaps = np.diff([r.arrival_s for r in synthetic_trace(config)])
        return float(gaps.std() / gaps.mean())

    assert variation(ArrivalProcess.POISSON) == pytest.approx(1.0, abs=0.1)
    assert variation(ArrivalProcess.GAMMA) == pytest.approx(4.0, rel=0.2)
    assert variation(ArrivalProcess.MMPP) > 1.15


def test_lengths_and_tenants_follow_their_settings() -> None:
    config = SyntheticConfig(
        rate_per_s=20.0,
        duration_s=1000.0,
        mean_prompt_tokens=300.0,
        max_prompt_tokens=100_000,
        mean_output_tokens=50.0,
        output_sigma=0.0,
        tenants=(TenantShare(name="a", share=3.0), TenantShare(name="b", share=1.0)),
    )

    requests = list(synthetic_trace(config))

    assert np.mean([r.num_prompt_tokens for r in requests]) == pytest.approx(300.0, rel=0.05)
    assert {r.num_output_tokens for r in requests} == {50}
    share = sum(r.tenant == "a" for r in requests) / len(requests)
    assert share == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate_per_s": 0.0}, "rate_per_s must be above 0, not 0.0"),
        ({"rate_per_s": math.inf}, "rate_per_s must be finite and above 0, not inf"),
        ({"prompt_sigma": -1.0}, "prompt_sigma must be in 0..10, not -1.0"),
        ({"max_output_tokens": 0}, "max_output_tokens must be in 1..16777216, not 0"),
        ({"arrivals": ArrivalProcess.GAMMA, "burstiness": 0.0}, "burstiness must be in 0.01..1000"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
    ],
)
def test_bad_settings_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=f"^{message}"):
        SyntheticConfig(**fields)


def test_a_bad_share_is_named() -> None:
    with pytest.raises(SettingError, match=r"^share must be in 1e-09\.\.1000000000, not 0.0$"):
        TenantShare(name="a", share=0.0)


def test_window_and_load() -> None:
    trace = [request(float(second)) for second in range(10)]

    changed = transformed(trace, TransformConfig(start_s=2.0, end_s=7.0, load=2.0))

    assert [r.arrival_s for r in changed] == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_caps_cut_prefix_ids_too() -> None:
    trace = [
        request(0.0, num_prompt_tokens=2000, num_output_tokens=500, prefix_ids=(1, 2, 3, 4)),
        request(1.0),
    ]

    changed = list(transformed(trace, TransformConfig(max_prompt_tokens=600, max_output_tokens=20)))

    assert (changed[0].num_prompt_tokens, changed[0].num_output_tokens) == (600, 20)
    assert changed[0].prefix_ids == (1, 2)
    assert (changed[1].num_prompt_tokens, changed[1].num_output_tokens) == (100, 10)


def test_tenants_and_deadlines_are_given_out_by_share() -> None:
    trace = [request(float(second), tenant="old") for second in range(2000)]
    config = TransformConfig(
        tenants=(TenantShare(name="a"), TenantShare(name="b")),
        ttft_deadline_s=1.0,
        deadline_share=0.25,
        seed=5,
    )

    changed = list(transformed(trace, config))

    assert {r.tenant for r in changed} == {"a", "b"}
    assert sum(r.tenant == "a" for r in changed) == pytest.approx(1000, abs=100)
    assert sum(r.ttft_deadline_s == 1.0 for r in changed) == pytest.approx(500, abs=75)
    assert all(r.deadline_s == math.inf for r in changed)
    assert changed == list(transformed(trace, config))


def test_max_requests() -> None:
    trace = [request(float(at_s)) for at_s in range(4)]

    first = list(transformed(trace, TransformConfig(max_requests=3)))

    assert [r.arrival_s for r in first] == [0.0, 1.0, 2.0]
