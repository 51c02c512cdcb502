"""Which tokens the checks of truncated sampling accept: the likeliest tokens and the tokens tied
with them.
"""

import pytest

from penstock.client import TokenRecord, TopLogprob
from penstock.tools.verify.sampling_effects import first_unlikely

GREEDY = [5, 6, 7]


def record(token: int, logprob: float, best: float) -> TokenRecord:
    return TokenRecord(
        id=token, logprob=logprob, rank=1, top_logprobs=(TopLogprob(id=1, logprob=best),)
    )


def bare(token: int) -> TokenRecord:
    return TokenRecord(id=token, logprob=None, rank=None, top_logprobs=())


def test_a_tie_and_what_follows_it_are_likeliest() -> None:
    records = [record(5, -0.5, -0.5), record(9, -1.5, -1.5), record(8, -0.25, -0.25)]

    assert first_unlikely(records, GREEDY) is None


@pytest.mark.parametrize("at", [0, 2])
def test_a_less_likely_token_is_found_by_its_log_probability(at: int) -> None:
    records = [record(token, -0.5, -0.5) for token in GREEDY]
    records[at] = record(GREEDY[at], -0.75, -0.5)

    assert first_unlikely(records, GREEDY) == at


@pytest.mark.parametrize("at", [0, 2])
def test_without_log_probabilities_tokens_are_compared(at: int) -> None:
    records = [bare(token) for token in GREEDY]
    assert first_unlikely(records, GREEDY) is None

    records[at] = bare(9)

    assert first_unlikely(records, GREEDY) == at
