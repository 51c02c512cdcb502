"""Invariants of the prefill budget and of the batch limit, for any sequence of loads and any cost
coefficients.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.latency_target import BatchLimit, PrefillLimit

MAX_TOKENS, MIN_TOKENS, MAX_SEQS = 2048, 32, 256
models = st.builds(
    CostModel,
    step_s=st.floats(0.0, 0.1, allow_subnormal=False),
    prefill_token_s=st.floats(0.0, 1e-3, allow_subnormal=False),
    decode_slot_s=st.floats(0.0, 1e-2, allow_subnormal=False),
    context_token_s=st.floats(0.0, 1e-5, allow_subnormal=False),
)
loads = st.tuples(models, st.booleans(), st.integers(0, 300), st.integers(0, 10**5))
targets = st.floats(0.001, 0.5)


@given(target_s=targets, sequence=st.lists(loads, min_size=1, max_size=60))
def test_a_trusted_budget_keeps_the_target_or_is_the_least(
    target_s: float, sequence: list[tuple[CostModel, bool, int, int]]
) -> None:
    pacer = PrefillLimit(target_s, max_prefill_tokens=MAX_TOKENS, min_prefill_tokens=MIN_TOKENS)
    held = MAX_TOKENS
    for cost, is_trusted, decodes, context in sequence:
        step = pacer.budget(
            cost, is_trusted=is_trusted, num_decodes=decodes, num_context_tokens=context
        )

        assert MIN_TOKENS <= step.num_prefill_tokens <= MAX_TOKENS
        if not decodes:
            assert step.num_prefill_tokens == MAX_TOKENS
            continue
        assert step.num_prefill_tokens <= held + max(held // 4, 16)
        held = step.num_prefill_tokens
        if is_trusted and held > MIN_TOKENS:
            assert step.predicted_step_s <= target_s * (1.0 + 1e-9)
        if is_trusted and step.is_over_target:
            base_s = cost.step_time_s(
                num_prefill_tokens=0, num_decodes=decodes, num_context_tokens=context
            )
            least_s = MIN_TOKENS * (cost.prefill_token_s + cost.context_token_s)
            assert step.predicted_step_s <= max(base_s, target_s) + least_s + 1e-12


@given(target_s=targets, load=loads, starts=st.lists(loads, max_size=30))
def test_a_steady_load_is_answered_in_one_direction(
    target_s: float,
    load: tuple[CostModel, bool, int, int],
    starts: list[tuple[CostModel, bool, int, int]],
) -> None:
    pacer = PrefillLimit(target_s, max_prefill_tokens=MAX_TOKENS, min_prefill_tokens=MIN_TOKENS)

    def reported(one: tuple[CostModel, bool, int, int]) -> int:
        cost, is_trusted, decodes, context = one
        return pacer.budget(
            cost, is_trusted=is_trusted, num_decodes=decodes, num_context_tokens=context
        ).num_prefill_tokens

    for start in starts:
        reported(start)
    sequence = [reported(load) for _ in range(300)]

    assert sequence[1:] in (sorted(sequence[1:]), sorted(sequence[1:], reverse=True))
    assert len(set(sequence[-50:])) == 1


@given(target_s=targets, sequence=st.lists(loads, min_size=1, max_size=80))
def test_the_batch_limit_moves_slowly_within_its_bounds(
    target_s: float, sequence: list[tuple[CostModel, bool, int, int]]
) -> None:
    limit = BatchLimit(target_s, max_num_seqs=MAX_SEQS, min_num_seqs=2, period_steps=4)
    before = limit.num_seqs
    for index, (cost, is_trusted, decodes, context) in enumerate(sequence, start=1):
        after = limit.observe(
            cost, is_trusted=is_trusted, num_decodes=decodes, num_context_tokens=context
        )

        assert 2 <= after <= MAX_SEQS
        assert abs(after - before) <= (max(before // 16, 1) if index % 4 == 0 else 0)
        before = after
