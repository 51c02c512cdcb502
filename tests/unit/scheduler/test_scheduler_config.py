import pytest

from penstock.scheduler.config import SchedulerConfig, SchedulingOrder
from support.core import make_engine


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_batched_tokens", 0),
        ("watermark", 1.0),
        ("watermark", float("nan")),
        ("max_num_waiting", 0),
        ("max_num_waiting_tokens", 0),
        ("max_num_waiting_per_tenant", 0),
        ("max_num_running_per_tenant", 0),
        ("tenant_weights", {"a": 0.0}),
        ("tenant_weights", {"a": float("inf")}),
        ("prompt_token_weight", -1.0),
        ("prompt_token_weight", float("nan")),
        ("output_token_weight", float("inf")),
        ("aging_s", 0.0),
        ("aging_s", float("nan")),
        ("aging_stride", 0),
        ("max_lookahead", -1),
        ("max_num_overtakes", -1),
        ("max_overtake_s", float("nan")),
        ("max_prefill_share", 0.0),
        ("max_prefill_share", 1.1),
        ("yield_ratio", 1.0),
        ("yield_ratio", float("nan")),
        ("session_ttl_s", 0.0),
        ("session_ttl_s", float("inf")),
        ("session_retention_level", 35),
        ("session_retention_level", 101),
        ("max_session_share", 0.0),
        ("max_session_share", 1.1),
        ("max_session_tokens", 0),
    ],
)
def test_an_invalid_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SchedulerConfig(**{field: value})  # type: ignore[arg-type]


def test_contradicting_settings_are_named() -> None:
    with pytest.raises(ValueError, match="prompt_token_weight and output_token_weight"):
        SchedulerConfig(prompt_token_weight=0.0, output_token_weight=0.0)
    with pytest.raises(ValueError, match="max_num_running_per_tenant"):
        SchedulerConfig(order=SchedulingOrder.FCFS, max_num_running_per_tenant=1)


def test_the_budget_holds_a_token_for_every_slot() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        make_engine(max_num_seqs=8, max_num_batched_tokens=7)
