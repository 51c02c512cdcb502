"""How a generation becomes a submission to the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.executor import Feature
from penstock.scheduler.request import NO_TIME, CacheRetention, Constraint, ConstraintKind
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, RequestError
from penstock.server.front.generation import (
    GenerationSpec,
    Output,
    Sampling,
    Stopping,
    TokenInput,
    Urgency,
)
from penstock.server.front.limits import Limits
from penstock.server.front.submission import (
    CallTimes,
    Submission,
    TokenizedPrompt,
    check_prompt_fits,
    hash_prompt,
    output_seed,
    submission_for,
)
from support.fronts import INFO

LIMITS = Limits.from_config(FrontConfig(default_max_tokens=100), INFO)
GENERATION = GenerationSpec(prompt=TokenInput(ids=(1,)), prompt_path="token_prompt.ids")
IDS = np.arange(40, dtype=np.int32)


def with_stopping(**fields: object) -> GenerationSpec:
    return structs.replace(GENERATION, stopping=Stopping(**fields))  # type: ignore[arg-type]


def submit(
    generation: GenerationSpec = GENERATION,
    *,
    times: CallTimes | None = None,
    limits: Limits = LIMITS,
    eos_ids: tuple[int, ...] = (2,),
    seed: int = 7,
) -> Submission:
    return submission_for(
        generation,
        TokenizedPrompt(ids=IDS),
        limits=limits,
        times=times or CallTimes(arrival_s=100.0),
        request_id="r",
        keys=tuple(range(1, generation.sampling.num_outputs + 1)),
        seed=seed,
        eos_ids=eos_ids,
    )


def failure(
    generation: GenerationSpec, num_prompt_tokens: int, limits: Limits = LIMITS
) -> tuple[ErrorReason, str]:
    with pytest.raises(RequestError) as caught:
        check_prompt_fits(generation, num_prompt_tokens, limits)
    failure = caught.value.failure
    return failure.reason, failure.violations[0].path


def test_default_max_tokens_is_the_rest_of_the_context() -> None:
    assert check_prompt_fits(GENERATION, 10, LIMITS) == 100
    assert check_prompt_fits(GENERATION, 500, LIMITS) == 12
    assert check_prompt_fits(with_stopping(max_tokens=502), 10, LIMITS) == 502


def test_requests_that_never_fit_the_context_are_rejected() -> None:
    too_long = ErrorReason.PROMPT_TOO_LONG
    assert failure(with_stopping(max_tokens=503), 10) == (too_long, "stopping.max_tokens")
    assert failure(GENERATION, 512) == (too_long, "token_prompt.ids")
    assert failure(GENERATION, 10**6) == (too_long, "token_prompt.ids")


def test_a_prompt_longer_than_the_limit_of_the_executor_is_rejected() -> None:
    limits = Limits.from_config(FrontConfig(), replace(INFO, max_prompt_tokens=20))
    too_long = ErrorReason.PROMPT_TOO_LONG
    assert limits.max_prompt_tokens == 20
    assert check_prompt_fits(GENERATION, 20, limits) == 256
    assert failure(GENERATION, 21, limits) == (too_long, "token_prompt.ids")
    # The prompt is to blame even where max_tokens would be as well.
    assert failure(with_stopping(max_tokens=511), 21, limits) == (too_long, "token_prompt.ids")
    assert failure(with_stopping(max_tokens=511), 20, limits) == (too_long, "stopping.max_tokens")
    # A limit above the context or the cache has no effect.
    assert (
        Limits.from_config(FrontConfig(), replace(INFO, max_prompt_tokens=9999)).max_prompt_tokens
        == 511
    )
    small = replace(INFO, max_prompt_tokens=100, num_blocks=4)
    assert Limits.from_config(FrontConfig(), small).max_prompt_tokens == 63


def test_requests_that_never_fit_the_cache_are_rejected() -> None:
    small = Limits.from_config(FrontConfig(), replace(INFO, num_blocks=4))
    assert small.max_total_tokens == 64
    exceeds = ErrorReason.EXCEEDS_KV_CACHE
    assert failure(with_stopping(max_tokens=60), 10, small) == (exceeds, "stopping.max_tokens")
    assert failure(GENERATION, 64, small) == (exceeds, "token_prompt.ids")
    assert check_prompt_fits(GENERATION, 60, small) == 4


@pytest.mark.parametrize(
    ("fields", "others", "least"),
    [
        ({}, {}, 90),
        ({"min_tokens": 3}, {}, 90),
        ({"ignore_eos": False}, {}, 0),
        ({"stop_token_ids": (9,), "min_tokens": 3}, {}, 3),
        ({"stop_strings": ("x",)}, {}, 0),
        ({}, {"constraint": Constraint(kind=ConstraintKind.REGEX, texts=("a",))}, 0),
        ({}, {"urgency": Urgency(time_limit_s=1.0)}, 0),
    ],
)
def test_an_output_that_only_its_limit_ends_has_all_tokens(
    fields: dict[str, Any], others: dict[str, Any], least: int
) -> None:
    asked = with_stopping(**{"max_tokens": 90, "ignore_eos": True} | fields)
    (spec,) = submit(structs.replace(asked, **others)).specs
    assert spec.min_tokens == least


def test_no_tokens_and_min_tokens_beyond_the_default() -> None:
    invalid = ErrorReason.INVALID_ARGUMENT
    assert failure(GENERATION, 0) == (invalid, "token_prompt.ids")
    assert failure(with_stopping(min_tokens=101), 10) == (invalid, "stopping.min_tokens")


def test_seeds_of_outputs_differ_and_are_reproducible() -> None:
    seeds = [output_seed(7, index) for index in range(16)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 16
    assert seeds == [output_seed(7, index) for index in range(16)]
    assert all(0 <= output_seed(2**64 - 1, index) < 2**64 for index in range(3))


def test_followers_name_their_leader_and_return_no_prompt_logprobs() -> None:
    params = replace(GENERATION.sampling.params, num_prompt_logprobs=2)
    generation = structs.replace(
        GENERATION,
        sampling=Sampling(params=params, num_outputs=3),
        urgency=Urgency(ttft_deadline_s=1.0),
    )
    leader, *others = submit(generation).specs
    assert leader.sampling.num_prompt_logprobs == 2
    assert leader.ttft_deadline_s == 101.0
    for index, spec in enumerate(others, start=1):
        assert (spec.leader_key, spec.output_index) == (leader.key, index)
        assert spec.sampling.num_prompt_logprobs == -1
        assert spec.ttft_deadline_s == NO_TIME
        assert spec.prompt_ids is leader.prompt_ids


def test_every_output_is_asked_for_in_the_same_form() -> None:
    generation = structs.replace(
        GENERATION,
        sampling=Sampling(num_outputs=3),
        adapter="poet",
        constraint=Constraint(kind=ConstraintKind.REGEX, texts=("a+",)),
        retention=CacheRetention(level=90, duration_s=5.0),
    )
    for spec in submit(generation).specs:
        assert spec.adapter == "poet"
        assert spec.constraint is generation.constraint
        assert spec.retention is generation.retention


def test_an_unused_seed_is_not_reported() -> None:
    limits = replace(LIMITS, features=LIMITS.features - {Feature.SEED})
    assert submit().seed == 7
    unseeded = submit(limits=limits)
    assert unseeded.seed == 0
    assert unseeded.specs[0].sampling.seed == 7


def test_end_of_sequence_ends_unless_ignored() -> None:
    assert submit().specs[0].stop_ids == (2,)
    assert submit(with_stopping(stop_token_ids=(5, 2))).specs[0].stop_ids == (5, 2)
    assert submit(with_stopping(stop_token_ids=(5,), ignore_eos=True)).specs[0].stop_ids == (5,)


@pytest.mark.parametrize(
    ("call_s", "total_s", "deadline_s", "kind"),
    [
        (NO_TIME, None, 700.0, "server"),
        (130.0, None, 130.0, "grpc"),
        (130.0, 20.0, 120.0, "total"),
        (110.0, 20.0, 110.0, "grpc"),
        (1e9, None, 3700.0, "server"),
        (NO_TIME, 3600.0, 3700.0, "server"),
    ],
)
def test_the_earliest_deadline_counts(
    call_s: float, total_s: float | None, deadline_s: float, kind: str
) -> None:
    generation = structs.replace(GENERATION, urgency=Urgency(total_deadline_s=total_s))
    submission = submit(generation, times=CallTimes(arrival_s=100.0, call_deadline_s=call_s))
    assert submission.specs[0].deadline_s == deadline_s
    assert submission.deadline_kind == kind


def hashed(
    generation: GenerationSpec, *, is_prefix_caching: bool = True, salt: bytes = b"x"
) -> TokenizedPrompt:
    return hash_prompt(
        IDS, generation, 16, is_prefix_caching=is_prefix_caching, random_salt=lambda: salt
    )


def test_hash_salts_differ_for_every_tenant_adapter_and_salt() -> None:
    names = ("", "a", "b", "ab", "c", "t", "tb")
    asked = [
        structs.replace(GENERATION, tenant=tenant, adapter=adapter, cache_salt=salt)
        for tenant in names
        for adapter in names
        for salt in names
    ]
    assert len({hashed(one).hash_salt for one in asked}) == len(asked)


def test_tenants_share_blocks_only_where_it_is_allowed() -> None:
    def digests(tenant: str, *, shares: bool) -> tuple[bytes, ...]:
        return hash_prompt(
            IDS,
            structs.replace(GENERATION, tenant=tenant),
            16,
            is_prefix_caching=True,
            random_salt=lambda: b"x",
            shares_across_tenants=shares,
        ).block_hashes

    assert digests("a", shares=True) == digests("b", shares=True) == digests("", shares=False)
    assert len({digests(tenant, shares=False) for tenant in ("", "a", "b")}) == 3


def test_a_session_and_a_window_reach_the_engine_and_the_stream() -> None:
    submission = submission_for(
        structs.replace(GENERATION, session_id="mine"),
        TokenizedPrompt(ids=IDS, num_dropped_messages=3),
        limits=LIMITS,
        times=CallTimes(arrival_s=100.0),
        request_id="r",
        keys=(1,),
        seed=7,
        eos_ids=(),
    )
    assert submission.specs[0].session_id == "mine"
    assert submission.num_dropped_messages == 3


def test_hashes_are_shared_within_a_salt_and_not_across() -> None:
    plain = hashed(GENERATION)
    assert plain.block_hashes == hash_blocks(IDS, 16, chain_root(plain.hash_salt))
    assert len(plain.block_hashes) == 2
    salted = hashed(structs.replace(GENERATION, cache_salt="a"))
    other = hashed(structs.replace(GENERATION, cache_salt="b"))
    assert hashed(structs.replace(GENERATION, cache_salt="a")).block_hashes == salted.block_hashes
    assert len({plain.block_hashes, salted.block_hashes, other.block_hashes}) == 3


def test_adapters_share_no_blocks() -> None:
    asked = [("", ""), ("", "ab"), ("ab", ""), ("a", "b"), ("b", "a"), ("poet", "ab")]
    reported = {
        hashed(structs.replace(GENERATION, adapter=adapter, cache_salt=salt)).block_hashes
        for adapter, salt in asked
    }
    assert len(reported) == len(asked)
    poet = structs.replace(GENERATION, adapter="poet")
    assert hashed(poet) != hashed(GENERATION)
    assert hashed(poet).block_hashes == hashed(poet).block_hashes


def test_without_caching_only_outputs_of_one_request_share() -> None:
    two = structs.replace(GENERATION, sampling=Sampling(num_outputs=2))
    assert hashed(GENERATION, is_prefix_caching=False).block_hashes == ()
    first = hashed(two, is_prefix_caching=False, salt=b"1")
    second = hashed(two, is_prefix_caching=False, salt=b"2")
    assert first.block_hashes
    assert first.block_hashes != second.block_hashes
    # A client cannot choose the salt that another request was given at random.
    guessed = hashed(structs.replace(GENERATION, cache_salt="1"))
    assert guessed.block_hashes != first.block_hashes


def test_prompt_logprobs_disable_prefix_reuse() -> None:
    wants = structs.replace(GENERATION, output=Output(num_prompt_logprobs=0))
    assert hashed(wants).block_hashes == ()
    assert hashed(structs.replace(wants, sampling=Sampling(num_outputs=2))).block_hashes


SEEDS_OF_7 = [7, 5576936958904625109, 16783414663788028321, 4313588532706559288]


def seeds_of(seed: int, num_outputs: int) -> list[int]:
    """Return the seeds that the engine gets for the outputs, in the order of the outputs."""
    sampling = Sampling(num_outputs=num_outputs)
    submission = submit(structs.replace(GENERATION, sampling=sampling), seed=seed)
    assert submission.seed == seed
    assert [spec.output_index for spec in submission.specs] == list(range(num_outputs))
    return [spec.sampling.seed for spec in submission.specs]


@pytest.mark.parametrize("num_outputs", [1, 2, 4])
def test_the_engine_receives_the_documented_seeds(num_outputs: int) -> None:
    assert seeds_of(7, num_outputs) == SEEDS_OF_7[:num_outputs]


def test_an_output_can_be_replayed_without_the_others() -> None:
    assert [output_seed(7, index) for index in range(4)] == SEEDS_OF_7
    assert output_seed(2**64 - 1, 1) == 4821442246385253236


def test_the_first_output_has_the_seed_of_the_request() -> None:
    for seed in (0, 1, 2**64 - 1):
        assert output_seed(seed, 0) == seed
        assert seeds_of(seed, 2)[0] == seed
