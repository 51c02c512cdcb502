"""The seeds of a request's outputs: they must never change, because replays depend on them."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.server.front.config import FrontConfig
from penstock.server.front.generation import Generation, Sampling, TokenInput
from penstock.server.front.limits import Limits
from penstock.server.front.submission import (
    CallTimes,
    TokenisedPrompt,
    output_seed,
    submission_for,
)
from support.fronts import INFO

SEEDS_OF_7 = [7, 5576936958904625109, 16783414663788028321, 4313588532706559288]


def seeds_of(seed: int, num_outputs: int) -> list[int]:
    """Return the seeds that the engine receives, in the order of the outputs."""
    generation = Generation(
        prompt=TokenInput(ids=(1,)),
        prompt_path="token_prompt.ids",
        sampling=Sampling(num_outputs=num_outputs),
    )
    submission = submission_for(
        generation,
        TokenisedPrompt(ids=np.array([1], dtype=np.int32)),
        limits=Limits.of(FrontConfig(), INFO),
        times=CallTimes(arrival_s=0.0),
        request_id="r",
        keys=tuple(range(1, num_outputs + 1)),
        seed=seed,
        eos_ids=(),
    )
    assert submission.seed == seed
    assert [spec.output_index for spec in submission.specs] == list(range(num_outputs))
    return [spec.sampling.seed for spec in submission.specs]


@pytest.mark.parametrize("num_outputs", [1, 2, 4])
def test_the_engine_is_given_the_seeds_that_are_promised(num_outputs: int) -> None:
    assert seeds_of(7, num_outputs) == SEEDS_OF_7[:num_outputs]


def test_an_output_can_be_replayed_without_the_others() -> None:
    assert [output_seed(7, index) for index in range(4)] == SEEDS_OF_7
    assert output_seed(2**64 - 1, 1) == 4821442246385253236


def test_the_first_output_has_the_seed_of_the_request() -> None:
    for seed in (0, 1, 2**64 - 1):
        assert output_seed(seed, 0) == seed
        assert seeds_of(seed, 2)[0] == seed
