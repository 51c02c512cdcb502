"""How long the prefill budget stays before its next increase, after an increase that had to be
reversed.
"""

from itertools import pairwise

import pytest

from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.latency_target import PrefillLimit

TARGET_S = 0.05
CLIFF_TOKENS = 128
NUM_DECODES = 100
FIRST_WAIT_STEPS = 64


def cost(token_s: float) -> CostModel:
    return CostModel(step_s=0.01, prefill_token_s=token_s, decode_slot_s=1e-4, context_token_s=0.0)


# Room for 300 tokens, or for 100.
CHEAP, DEAR = cost(1e-4), cost(3e-4)


class Cliff:
    """A prefill limit on a simulated device. A prefill token costs three times as much once a step
    has more than CLIFF_TOKENS of them.
    """

    def __init__(self) -> None:
        self.paced = PrefillLimit(TARGET_S, max_prefill_tokens=2048)
        self.held = 2048

    def step(self, num_decodes: int = NUM_DECODES, *, is_even: bool = False) -> int:
        is_dear = self.held > CLIFF_TOKENS and not is_even
        self.held = self.paced.budget(
            DEAR if is_dear else CHEAP,
            is_trusted=True,
            num_decodes=num_decodes,
            num_context_tokens=0,
        ).num_prefill_tokens
        return self.held

    def probes(self, num_steps: int, num_decodes: int = NUM_DECODES) -> list[int]:
        """Run steps; return the indices of those whose prefill budget exceeds CLIFF_TOKENS."""
        return [at for at in range(num_steps) if self.step(num_decodes) > CLIFF_TOKENS]


def test_the_wait_doubles_after_each_reversed_increase() -> None:
    machine = Cliff()
    machine.step()
    gaps = [after - before for before, after in pairwise(machine.probes(3000))]
    assert len(gaps) >= 5
    assert gaps[0] == pytest.approx(FIRST_WAIT_STEPS, abs=8)
    assert all(after == pytest.approx(2 * before, abs=16) for before, after in pairwise(gaps))


def test_under_a_lighter_load_an_increase_does_not_wait() -> None:
    for num_decodes, can_rise in ((NUM_DECODES, False), (NUM_DECODES // 2, True)):
        machine = Cliff()
        machine.step()
        first = machine.probes(20)
        assert len(first) == 1
        assert bool(machine.probes(20, num_decodes)) is can_rise


def test_an_increase_that_is_kept_resets_the_wait() -> None:
    machine = Cliff()
    machine.step()
    assert len(machine.probes(1000)) >= 3
    # For long enough all steps cost the same, and then the cliff is back.
    for _ in range(2000):
        machine.step(is_even=True)
    assert machine.held > 2 * CLIFF_TOKENS
    machine.step()
    gaps = [after - before for before, after in pairwise(machine.probes(500))]
    assert gaps[0] == pytest.approx(FIRST_WAIT_STEPS, abs=8)


def test_a_heavier_load_is_no_failure_of_the_rise() -> None:
    machine = Cliff()
    machine.step()
    machine.step(is_even=True)
    while machine.step(is_even=True) <= CLIFF_TOKENS:
        pass
    # It falls for the decodes that came, and when they leave it rises at once.
    assert machine.step(3 * NUM_DECODES, is_even=True) < CLIFF_TOKENS
    for _ in range(20):
        machine.step(is_even=True)
    assert machine.held > 2 * CLIFF_TOKENS
