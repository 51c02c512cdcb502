"""Finds the maximum load at which in-flight FCFS meets its targets.

The search has two passes: a coarse grid of loads, then a fine grid around the load at which FCFS
starts to miss them. All runs of a grid run in parallel; the loads tried depend only on the trace
and the server.
"""

from collections.abc import Callable, Sequence

import numpy as np

from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.simulation.settings import SimulationConfig
from report import RunFailed

GOOD_SHARE = 0.9
NUM_COARSE = 8
NUM_FINE = 8
MAX_ROUNDS = 8
_COARSE_STEP = 0.2

GoodShares = Callable[[Sequence[float]], list[float]]
"""Returns the share of good requests at each of these loads."""


def capacity(trace: Sequence[TraceRequest], base: SimulationConfig, shares: GoodShares) -> float:
    """Return the highest load tried at which 90 % of the requests meet their targets, as they do at
    all lower loads tried. Raises RunFailed if there is none.

    `shares`: runs FCFS at these loads. Loads are multiples of the trace's load.
    """
    step = _COARSE_STEP * saturating_load(trace, base)
    low = 0.0
    for _ in range(MAX_ROUNDS):
        loads = [low + step * number for number in range(1, NUM_COARSE + 1)]
        num_met = _num_met(shares(loads))
        if num_met == NUM_COARSE:
            low = loads[-1]
            continue
        low = loads[num_met - 1] if num_met else low
        if low:
            fine = [low + step * number / (NUM_FINE + 1) for number in range(1, NUM_FINE + 1)]
            num_met = _num_met(shares(fine))
            return fine[num_met - 1] if num_met else low
        # The first load was too high.
        step /= NUM_COARSE
    raise RunFailed("no load was found at which FCFS just meets its targets: change --cost")


def saturating_load(trace: Sequence[TraceRequest], base: SimulationConfig) -> float:
    """Return an estimate of the load, as a multiple of the trace's, that keeps the server busy with
    full batches and without prefix cache hits. Raises RunFailed if all steps take no time, or if
    all requests arrive at once.
    """
    prompts = np.array([request.num_prompt_tokens for request in trace], dtype=np.float64)
    outputs = np.array([request.num_output_tokens for request in trace], dtype=np.float64)
    cost = base.cost
    contexts = prompts + outputs * (prompts + outputs / 2.0)
    # Memory may allow fewer requests than there are slots.
    num_places = base.num_blocks * base.block_size
    held = float((outputs * (prompts + outputs / 2.0)).sum() / outputs.sum())
    num_running = max(1.0, min(float(base.max_num_seqs), num_places / held))
    work_s = float(
        (
            cost.prefill_token_s * prompts
            + (cost.decode_slot_s + cost.step_s / num_running) * outputs
            + cost.context_token_s * contexts
        ).sum()
    )
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    if not (work_s > 0.0 and span_s > 0.0):
        raise RunFailed("a server that costs nothing or a trace without duration has no capacity")
    return span_s / work_s


def _num_met(shares: list[float]) -> int:
    num = 0
    for share in shares:
        if share < GOOD_SHARE:
            break
        num += 1
    return num
