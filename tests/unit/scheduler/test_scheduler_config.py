"""A bad setting is named."""

import pytest

from penstock.scheduler.config import SchedulerConfig
from support.core import make_engine, make_info


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_batched_tokens", 0),
        ("watermark", 1.0),
        ("watermark", float("nan")),
        ("max_num_waiting", 0),
        ("max_num_waiting_tokens", 0),
    ],
)
def test_a_bad_setting_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SchedulerConfig(**{field: value})  # type: ignore[arg-type]


def test_the_budget_holds_a_token_for_every_slot() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        make_engine(make_info(max_num_seqs=8), SchedulerConfig(max_num_batched_tokens=7))
