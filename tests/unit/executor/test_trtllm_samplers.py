"""The executor offers only features that the engine's sampler does not silently ignore."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.executor.trtllm.config import (
    AdapterConfig,
    DecodingType,
    GuidedDecodingBackend,
    KvCacheSettings,
    LoraSettings,
    SamplerOption,
    SamplerType,
    SpeculativeSettings,
    TrtllmConfig,
)
from penstock.executor.trtllm.samplers import offered_features
from penstock.scheduler.executor import Feature
from unit.executor.trtllm_recorder import recording_package

PLAIN = {Feature.LOGPROBS, Feature.LOGIT_BIAS, Feature.CACHE_RETENTION}
OPTIONAL = {Feature.PENALTIES, Feature.SEED, Feature.MIN_TOKENS, Feature.MIN_P}
NGRAM = SpeculativeSettings(decoding_type=DecodingType.NGRAM, max_draft_len=4)
EAGLE: dict[str, Any] = {
    "decoding_type": DecodingType.EAGLE,
    "max_draft_len": 4,
    "speculative_model": Path("/models/eagle"),
}


def offered(*, honours_penalties: bool = False, **settings: Any) -> frozenset[Feature]:
    package = recording_package(honours_penalties=honours_penalties)
    return offered_features(TrtllmConfig(**settings), package)


@pytest.mark.parametrize("sampler", [SamplerType.AUTO, SamplerType.TORCH])
def test_the_default_sampler_of_line_1_2_offers_nothing_that_it_ignores(
    sampler: SamplerType,
) -> None:
    assert offered(sampler_type=sampler) == PLAIN


def test_penalties_are_offered_where_the_default_sampler_has_code_for_them() -> None:
    assert offered(honours_penalties=True) == PLAIN | {Feature.PENALTIES}


def test_the_older_sampler_honours_all_of_it() -> None:
    # But returns no alternatives and no ranks.
    assert offered(sampler_type=SamplerType.TRTLLM) == (PLAIN | OPTIONAL) - {Feature.LOGPROBS}


@pytest.mark.parametrize(
    ("promise", "feature"),
    [
        (SamplerOption.PENALTIES, Feature.PENALTIES),
        (SamplerOption.SEED, Feature.SEED),
        (SamplerOption.MIN_TOKENS, Feature.MIN_TOKENS),
        (SamplerOption.MIN_P, Feature.MIN_P),
    ],
)
def test_features_promised_by_the_operator_are_offered(
    promise: SamplerOption, feature: Feature
) -> None:
    assert offered(sampler_honours=(promise,)) == PLAIN | {feature}


def test_with_speculation_only_the_operators_setting_counts() -> None:
    assert offered(speculative_config=NGRAM, honours_penalties=True) == PLAIN
    seed = (SamplerOption.SEED,)
    assert offered(speculative_config=NGRAM, sampler_honours=seed) == PLAIN | {Feature.SEED}


@pytest.mark.parametrize(
    ("settings", "has_sampler"),
    [
        (NGRAM, True),
        (SpeculativeSettings(decoding_type=DecodingType.AUTO), True),
        (SpeculativeSettings(**EAGLE), False),
        (SpeculativeSettings(**EAGLE, eagle3_one_model=False), True),
        (SpeculativeSettings(decoding_type=DecodingType.MTP, num_nextn_predict_layers=1), False),
    ],
    ids=["ngram", "auto", "eagle-inside", "eagle-beside", "mtp"],
)
def test_a_model_that_draws_by_itself_has_neither_logprobs_nor_bias(
    settings: SpeculativeSettings, has_sampler: bool
) -> None:
    features = offered(speculative_config=settings)
    assert (Feature.LOGPROBS in features) is has_sampler
    assert (Feature.LOGIT_BIAS in features) is has_sampler


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        (None, set()),
        (
            GuidedDecodingBackend.XGRAMMAR,
            {Feature.JSON_SCHEMA, Feature.REGEX, Feature.CHOICE, Feature.GRAMMAR},
        ),
        (
            GuidedDecodingBackend.LLGUIDANCE,
            {Feature.JSON_SCHEMA, Feature.CHOICE},
        ),
    ],
)
def test_constraints_depend_on_the_backend(
    backend: GuidedDecodingBackend | None, kinds: set[Feature]
) -> None:
    assert offered(guided_decoding_backend=backend) == PLAIN | kinds


def test_adapters_need_adapters_and_retention_needs_reuse() -> None:
    adapters = LoraSettings(adapters=(AdapterConfig(name="a", path=Path("/loras/a"), id=1),))
    assert Feature.ADAPTERS in offered(lora_config=adapters)
    no_reuse = KvCacheSettings(enable_block_reuse=False)
    assert Feature.CACHE_RETENTION not in offered(kv_cache_config=no_reuse)


def test_prompt_logprobs_are_never_offered() -> None:
    everything = offered(
        sampler_honours=tuple(SamplerOption),
        guided_decoding_backend=GuidedDecodingBackend.XGRAMMAR,
        lora_config=LoraSettings(adapters=(AdapterConfig(name="a", path=Path("/loras/a"), id=1),)),
    )
    assert everything == set(Feature) - {Feature.PROMPT_LOGPROBS}


def test_an_engine_built_ahead_returns_no_log_probabilities() -> None:
    package = replace(recording_package(), runs_engines=True)
    assert offered_features(TrtllmConfig(), package) == PLAIN - {Feature.LOGPROBS}
