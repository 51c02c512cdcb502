"""The prefill budget and the batch limit that keep a latency target, and the stability of the
control loop that sets them.

Step times, noise and pauses are simulated. No test depends on the speed of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.latency_target import BatchLimit, PrefillLimit, StepBudget
from penstock.scheduler.step_fit import StepFit

COST = CostModel(step_s=0.01, prefill_token_s=1e-4, decode_slot_s=1e-4, context_token_s=0.0)
TARGET_S = 0.05
MAX_TOKENS = 2048


def pacer(target_s: float = TARGET_S, **settings: int) -> PrefillLimit:
    return PrefillLimit(target_s, **{"max_prefill_tokens": MAX_TOKENS, **settings})


def budget(
    pacer: PrefillLimit, num_decodes: int, *, is_trusted: bool = True, context: int = 0
) -> StepBudget:
    return pacer.budget(
        COST, is_trusted=is_trusted, num_decodes=num_decodes, num_context_tokens=context
    )


def test_prefill_takes_all_that_decodes_leave() -> None:
    # 50 ms less 10 ms less 100 decodes of 0.1 ms leaves 30 ms: 300 tokens, 288 in whole blocks.
    step = budget(pacer(), 100)

    assert step.num_prefill_tokens == 288
    assert step.predicted_step_s == pytest.approx(0.0488)
    assert not step.is_over_target


def test_the_context_of_the_chunk_counts() -> None:
    cost = CostModel(step_s=0.01, prefill_token_s=1e-4, decode_slot_s=1e-4, context_token_s=1e-4)

    step = pacer().budget(cost, is_trusted=True, num_decodes=50, num_context_tokens=50)

    assert step.num_prefill_tokens == 144
    assert step.predicted_step_s == pytest.approx(0.0488)


def test_no_request_decodes_so_no_request_waits() -> None:
    paced = pacer()
    budget(paced, 100)

    assert budget(paced, 0).num_prefill_tokens == MAX_TOKENS
    assert budget(paced, 100).num_prefill_tokens == 288


def test_prefill_never_stalls_and_the_excess_is_reported() -> None:
    step = budget(pacer(min_prefill_tokens=32), 800)

    assert step.num_prefill_tokens == 32
    assert step.is_over_target
    assert step.predicted_step_s == pytest.approx(0.09 + 0.0032)


def test_without_trust_the_limit_is_the_fixed_one() -> None:
    assert budget(pacer(), 800, is_trusted=False).num_prefill_tokens == MAX_TOKENS


def test_without_trust_the_budget_rises_gradually_to_the_fixed_limit() -> None:
    paced = pacer()
    budget(paced, 100)

    rise = [budget(paced, 100, is_trusted=False).num_prefill_tokens for _ in range(80)]

    assert rise == sorted(rise)
    assert rise[:65] == [288] * 64 + [288 + 72]
    assert rise[-1] == MAX_TOKENS


def test_a_margin_lowers_the_budget_slowly() -> None:
    paced = pacer()
    sequence = [
        paced.budget(
            COST, is_trusted=True, num_decodes=100, num_context_tokens=0, margin=0.25
        ).num_prefill_tokens
        for _ in range(300)
    ]

    assert sequence == sorted(sequence, reverse=True)
    assert sequence[0] == 288
    # 50 ms / 1.25 less 20 ms.
    assert sequence[-1] in (192, 208)


def test_free_tokens_are_not_limited() -> None:
    free = CostModel(step_s=0.01, prefill_token_s=0.0, decode_slot_s=0.0, context_token_s=0.0)

    step = pacer().budget(free, is_trusted=True, num_decodes=10, num_context_tokens=10)

    assert step.num_prefill_tokens == MAX_TOKENS


def test_free_tokens_have_no_effect_if_the_step_alone_is_too_long() -> None:
    free = CostModel(step_s=0.06, prefill_token_s=0.0, decode_slot_s=0.0, context_token_s=0.0)

    step = pacer().budget(free, is_trusted=True, num_decodes=10, num_context_tokens=10)

    assert step.num_prefill_tokens == 16
    assert step.is_over_target


def test_step_response_falls_at_once_and_rises_without_overshoot() -> None:
    paced = pacer()
    for _ in range(5):
        budget(paced, 40)

    down = [budget(paced, 340).num_prefill_tokens for _ in range(5)]
    up = [budget(paced, 40).num_prefill_tokens for _ in range(30)]

    assert down == [48] * 5
    assert up == sorted(up)
    assert all(after <= before + max(before // 4, 16) for before, after in pairwise(up))
    # The last sixteenth may stay unused.
    assert 352 * 15 / 16 <= up[-1] <= 352
    assert up[-1] == up[-10]


# The closed loop.


@dataclass(slots=True)
class Loop:
    """A control loop of a step-time fit and a prefill limit, with simulated step times.
    `true_s(prefill, decodes, context)` returns the duration of a step in seconds; its arguments are
    the numbers of prefill tokens, decodes and context tokens.
    """

    true_s: Callable[[int, int, int], float]
    noise: float = 0.0
    pause_every: int = 0
    has_margin: bool = False
    fit: StepFit = field(default_factory=StepFit)
    paced: PrefillLimit = field(default_factory=pacer)

    def run(
        self, decodes: Iterable[int], backlog: Callable[[int], int] = lambda _: MAX_TOKENS
    ) -> tuple[list[int], list[float]]:
        """Return the prefill budget (tokens) and the duration (seconds) of each step. `decodes`:
        the number of decodes in each step; `backlog`: returns how many tokens wait for prefill,
        given the index of the step.
        """
        random = np.random.default_rng(11)
        budgets: list[int] = []
        times: list[float] = []
        for index, num_decodes in enumerate(decodes):
            context = num_decodes * 400
            step = self.paced.budget(
                self.fit,
                is_trusted=self.fit.is_trusted,
                num_decodes=num_decodes,
                num_context_tokens=context,
                margin=self.fit.error_p90 if self.has_margin else 0.0,
            )
            prefill = min(step.num_prefill_tokens, backlog(index))
            seconds = self.true_s(prefill, num_decodes, context + prefill)
            seconds *= float(random.lognormal(0.0, self.noise)) if self.noise else 1.0
            times.append(seconds)
            budgets.append(step.num_prefill_tokens)
            paused_s = 3.0 if self.pause_every and index % self.pause_every == 7 else 0.0
            self.fit.observe(
                seconds + paused_s,
                num_prefill_tokens=prefill,
                num_decodes=num_decodes,
                num_context_tokens=context + prefill,
            )
        return budgets, times


def linear(prefill: int, decodes: int, context: int) -> float:
    return 0.012 + 1.5e-4 * prefill + 2e-4 * decodes + 1e-8 * context


def convex(prefill: int, decodes: int, context: int) -> float:
    """Return a step time in seconds. It grows superlinearly with the number of prefill tokens."""
    return linear(prefill, decodes, context) + 2e-7 * prefill * prefill


def stairs(prefill: int, decodes: int, context: int) -> float:
    """Return the step time of a kernel that pads prefill to tiles of 128 tokens, and decodes to
    tiles of 8.
    """
    return linear(-(-prefill // 128) * 128, -(-decodes // 8) * 8, context)


def num_turns(sequence: list[int]) -> int:
    """Return how often the sequence changes between rising and falling."""
    moves = [after - before for before, after in pairwise(sequence) if after != before]
    return sum(a * b < 0 for a, b in pairwise(moves))


@pytest.mark.parametrize("plant", [linear, convex])
def test_a_steady_load_gives_a_constant_budget(plant: Callable[[int, int, int], float]) -> None:
    budgets, times = Loop(plant).run([64] * 3000)

    assert len(set(budgets[-1000:])) == 1, "a limit cycle"
    assert num_turns(budgets[200:]) <= 4
    assert times[-1] <= TARGET_S * 1.05
    # Prefill gets the rest of the target, except for the dead band and a tile.
    assert times[-1] >= TARGET_S * 0.8


def test_probes_become_rarer_if_step_times_increase_in_stairs() -> None:
    # Up to 128 tokens fit the target, the next tile does not. What the fit states in between
    # depends on which heights it saw last; wherever the limit stops, it is within that tile.
    budgets, times = Loop(stairs).run([64] * 16_000)

    moves = np.flatnonzero(np.diff(budgets))
    assert 0 < budgets[-1] <= 128
    assert moves[-1] < 12_000, "a limit cycle"
    assert np.sum(moves >= 8000) <= np.sum((moves >= 1000) & (moves < 8000)) / 2
    assert np.mean(np.array(times[1000:]) > TARGET_S) < 0.03


def test_noise_moves_the_budget_by_less_than_the_noise() -> None:
    budgets, times = Loop(linear, noise=0.1, pause_every=50).run([64] * 3000)

    late = np.array(budgets[1000:])
    # The ideal is 166 tokens.
    assert late.min() >= 128
    assert late.max() <= 192
    assert num_turns(budgets[1000:]) < 100
    assert np.median(times[1000:]) <= TARGET_S * 1.03


def test_with_the_margin_most_steps_keep_the_target() -> None:
    _, times = Loop(linear, noise=0.1, has_margin=True).run([64] * 3000)

    assert np.mean(np.array(times[1000:]) > TARGET_S) < 0.12


def test_load_steps_cost_a_bounded_overshoot() -> None:
    decodes = [32] * 600 + [128] * 300 + [16] * 300 + [100] * 300

    budgets, times = Loop(linear).run(decodes)

    # No earlier step had 128 decodes, so their cost is not learned yet.
    assert max(times[600:]) <= TARGET_S * 1.2
    assert max(times[610:]) <= TARGET_S * 1.02
    assert num_turns(budgets[600:900]) <= 4
    assert num_turns(budgets[900:1200]) <= 4


def test_random_load_keeps_the_target() -> None:
    random = np.random.default_rng(5)
    decodes = np.clip(np.cumsum(random.integers(-4, 5, 4000)) + 60, 1, 150).tolist()
    waiting = random.choice([0, 40, 500, 4000], 4000).tolist()

    _, times = Loop(linear, noise=0.02).run(decodes, waiting.__getitem__)

    late = np.array(times[500:])
    assert np.mean(late > TARGET_S * 1.05) < 0.02
    assert late.max() < TARGET_S * 1.15


def test_adversarial_load_keeps_the_target() -> None:
    decodes = [150 if (index // 3) % 2 else 10 for index in range(3000)]

    _, times = Loop(linear).run(decodes, lambda index: 4000 if index % 2 else 0)

    assert max(times[500:]) <= TARGET_S * 1.05


def test_the_budget_follows_a_machine_that_slows_down() -> None:
    loop = Loop(linear)
    loop.run([64] * 1000)
    loop.true_s = lambda prefill, decodes, context: 1.5 * linear(prefill, decodes, context)

    budgets, times = loop.run([64] * 1000)

    assert max(times) <= TARGET_S * 1.55
    assert max(times[300:]) <= TARGET_S * 1.05
    assert len(set(budgets[-300:])) == 1


# The batch.


def settle(
    limit: BatchLimit, num_steps: int, *, is_trusted: bool = True, num_decodes: int = 10
) -> list[int]:
    return [
        limit.observe(COST, is_trusted=is_trusted, num_decodes=num_decodes, num_context_tokens=100)
        for _ in range(num_steps)
    ]


def test_the_batch_shrinks_to_what_the_target_allows() -> None:
    # 50 ms less 10 ms less 16 prefill tokens of 0.1 ms, at 0.1 ms each: 384.
    limits = settle(BatchLimit(TARGET_S, max_num_seqs=1024), 2000)

    assert limits == sorted(limits, reverse=True)
    assert limits[:15] == [1024] * 15
    assert all(before - after <= before // 16 for before, after in pairwise(limits))
    assert 384 <= limits[-1] <= 384 * 16 / 15
    assert limits[-1] == limits[-500]


def test_small_batches_reach_the_exact_limit() -> None:
    # 11.95 ms less 10 less 1.6 leaves room for three.
    limits = settle(BatchLimit(0.01195, max_num_seqs=16), 1000)

    assert limits[-1] == 3


def test_the_batch_grows_back_slowly() -> None:
    limit = BatchLimit(TARGET_S, max_num_seqs=256)
    cost = CostModel(step_s=0.01, prefill_token_s=1e-4, decode_slot_s=0.0, context_token_s=1e-6)
    limits: list[int] = []
    for context, is_growing in ((1000, False), (100, True)):
        limits = [
            limit.observe(cost, is_trusted=True, num_decodes=10, num_context_tokens=10 * context)
            for _ in range(4000)
        ]
        assert limits == sorted(limits, reverse=not is_growing)
    assert limits[-1] == 256


def test_alternating_context_does_not_make_the_batch_oscillate() -> None:
    limit = BatchLimit(TARGET_S, max_num_seqs=256)
    cost = CostModel(step_s=0.01, prefill_token_s=1e-4, decode_slot_s=0.0, context_token_s=1e-6)

    limits = [
        limit.observe(
            cost,
            is_trusted=True,
            num_decodes=10,
            num_context_tokens=10_000 if (index // 8) % 2 else 2000,
        )
        for index in range(4000)
    ]

    assert num_turns(limits[1000:]) <= 2


def test_without_trust_the_batch_goes_back_to_its_maximum() -> None:
    limit = BatchLimit(TARGET_S, max_num_seqs=1024)
    settle(limit, 2000)

    limits = settle(limit, 2000, is_trusted=False)

    assert limits == sorted(limits)
    assert limits[-1] == 1024


def test_an_idle_machine_predicts_nothing_about_the_batch() -> None:
    limits = settle(BatchLimit(TARGET_S, max_num_seqs=64), 100, num_decodes=0)

    assert limits == [64] * 100


@pytest.mark.parametrize("target_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_target_is_rejected(target_s: float) -> None:
    with pytest.raises(ValueError, match="target_itl_s"):
        pacer(target_s)
    with pytest.raises(ValueError, match="target_itl_s"):
        BatchLimit(target_s, max_num_seqs=8)


def test_an_invalid_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="min_prefill_tokens"):
        pacer(min_prefill_tokens=0)
    with pytest.raises(ValueError, match="max_prefill_tokens"):
        pacer(max_prefill_tokens=8)
    with pytest.raises(ValueError, match="quantum_tokens"):
        pacer(quantum_tokens=0)
    with pytest.raises(ValueError, match="min_num_seqs"):
        BatchLimit(TARGET_S, max_num_seqs=4, min_num_seqs=5)
    with pytest.raises(ValueError, match="min_prefill_tokens"):
        BatchLimit(TARGET_S, max_num_seqs=4, min_prefill_tokens=-1)
    with pytest.raises(ValueError, match="period_steps"):
        BatchLimit(TARGET_S, max_num_seqs=4, period_steps=0)
