"""Which request specs are rejected, and that replayed tokens count as output."""

import numpy as np
import pytest

from penstock.scheduler.request import MAX_STOP_IDS, Request
from penstock.scheduler.state import IllegalTransition, RequestEvent, RequestState
from support.core import make_spec


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"key": 0}, "key"),
        ({"key": 2**63, "prompt": [1]}, "key"),
        ({"prompt": []}, "prompt_ids"),
        ({"prompt": [1, 2], "num_replayed": 2}, "prompt_ids"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"num_replayed": 4}, "max_tokens"),
        ({"stop_ids": tuple(range(MAX_STOP_IDS + 1))}, "stop_ids"),
    ],
)
def test_a_spec_rejects_what_would_hurt_the_batch(kwargs: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make_spec(**({"key": 1} | kwargs))  # type: ignore[arg-type]


def test_replayed_tokens_are_output() -> None:
    spec = make_spec(1, 10, num_replayed=3, max_tokens=5)
    assert spec.num_original_prompt_tokens == 7
    assert spec.max_total_tokens == 12


def test_a_minimum_bars_stop_ids_where_there_are_any() -> None:
    assert make_spec(1, min_tokens=3, stop_ids=(9,)).num_stop_banned_tokens == 3
    assert make_spec(1, min_tokens=4, max_tokens=4).num_stop_banned_tokens == 0


def test_an_illegal_event_changes_nothing() -> None:
    spec = make_spec(1)
    request = Request(spec=spec, sequence=0, tokens=np.zeros(1, np.int32), block_hashes=[])
    with pytest.raises(IllegalTransition):
        request.apply(RequestEvent.FINISH)
    assert request.state is RequestState.PENDING
