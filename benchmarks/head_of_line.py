"""Measures how much a very long prompt delays short prompts behind it (head-of-line blocking).

Short prompts arrive at random times; in between, a prompt of 100,000 tokens arrives every 15 s.
Reports the TTFT of the short prompts that arrive while a long one waits or is computed, under FCFS
and under the fair order: with long prompts of the same tenant, with long prompts of another tenant,
and, for comparison, without long prompts. Runs in virtual time.
"""

import dataclasses
import itertools
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import numpy as np

from penstock.scheduler.cost_model import CostModel
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.settings import BatchingPolicy, SimulationConfig
from penstock.tools.simulation.simulate import simulate
from report import Check, Outcome, arguments, at_most, print_rows, run

NUM_LONG_TOKENS = 100_000
NUM_SHORT_TOKENS = 400
NUM_OUTPUT_TOKENS = 60
SHORT_PER_S = 12.0
LONG_EVERY_S = 15.0
MAX_FULL_STEPS = 3.0
"""Goal for the TTFT of a short prompt, in full steps: the rest of the running step, the step of the
request, and one for requests that arrived together with it.
"""
MAX_OVER_FCFS = 0.1
MAX_LONG_RATIO = 1.5


def trace_of(duration_s: float, long_tenant: str | None) -> list[TraceRequest]:
    """Return short prompts of one tenant at random arrivals, with a long prompt every
    `LONG_EVERY_S` seconds if `long_tenant` is given."""
    random = np.random.default_rng(7)
    arrivals_s = np.cumsum(random.exponential(1.0 / SHORT_PER_S, int(duration_s * SHORT_PER_S)))
    requests = [_request(float(at_s), NUM_SHORT_TOKENS, "short") for at_s in arrivals_s]
    if long_tenant is not None:
        requests += [
            _request(float(at_s), NUM_LONG_TOKENS, long_tenant)
            for at_s in np.arange(LONG_EVERY_S / 2.0, duration_s, LONG_EVERY_S)
        ]
    return sorted(requests, key=lambda request: request.arrival_s)


def _request(arrival_s: float, num_prompt_tokens: int, tenant: str) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=NUM_OUTPUT_TOKENS,
        tenant=tenant,
    )


def ttft_of(config: SimulationConfig, trace: Iterable[TraceRequest]) -> dict[str, float]:
    """Return the TTFT in seconds: percentiles of the short prompts that arrived during a long one
    (of all if there is no long one), and the mean of the long ones.
    """
    table = simulate(trace, config).recorder.table
    arrival_s = table.seconds("arrival_s")
    ttft_s = table.seconds("first_token_s") - arrival_s
    is_long = table.counts("num_prompt_tokens") == NUM_LONG_TOKENS
    met = ~is_long
    if is_long.any():
        met = np.zeros(len(is_long), dtype=np.bool_)
        for start_s, end_s in zip(arrival_s[is_long], (arrival_s + ttft_s)[is_long], strict=True):
            met |= ~is_long & (arrival_s >= start_s) & (arrival_s < end_s)
    return {
        "p50_s": float(np.percentile(ttft_s[met], 50)),
        "p99_s": float(np.percentile(ttft_s[met], 99)),
        "max_s": float(ttft_s[met].max()),
        "long_s": float(ttft_s[is_long].mean()) if is_long.any() else 0.0,
    }


def measure(options: Namespace) -> Outcome:
    duration_s = 600.0 if options.full else 120.0
    base = SimulationConfig(cost=CostModel(), num_blocks=16_384)
    tenants = {"none": None, "same tenant": "short", "another tenant": "long"}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for policy, (name, tenant) in itertools.product(
        (BatchingPolicy.FCFS, BatchingPolicy.FAIR), tenants.items()
    ):
        config = dataclasses.replace(base, policy=policy)
        found = ttft_of(config, trace_of(duration_s, tenant))
        rows[str(policy), name] = {"order": str(policy), "long ones": name, **found}
    title = f"TTFT of prompts of {NUM_SHORT_TOKENS} tokens that met one of {NUM_LONG_TOKENS:,}"
    print_rows(title, list(rows.values()))
    full_step_s = base.cost.step_time_s(
        num_prefill_tokens=base.scheduler.max_num_batched_tokens,
        num_decodes=0,
        num_context_tokens=NUM_LONG_TOKENS,
    )
    checks: list[Check] = []
    for name in ("same tenant", "another tenant"):
        fair_s, fcfs_s = (rows[order, name]["p99_s"] for order in ("fair", "fcfs"))
        title = f"p99 TTFT of short ones, fair, long ones of {name}"
        checks += [
            at_most(f"{title}: in full steps", fair_s / full_step_s, MAX_FULL_STEPS, "steps"),
            at_most(f"{title}: over fcfs", fair_s / fcfs_s, MAX_OVER_FCFS, "times"),
        ]
    fair_s, fcfs_s = (rows[order, "same tenant"]["long_s"] for order in ("fair", "fcfs"))
    name = "TTFT of the long ones, fair over fcfs"
    return list(rows.values()), [*checks, at_most(name, fair_s / fcfs_s, MAX_LONG_RATIO, "times")]


if __name__ == "__main__":
    run(arguments(__doc__), measure)
