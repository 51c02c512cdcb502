"""Determines which sampling options the engine supports, and so which features this executor
offers.

A sampler of TensorRT-LLM accepts every parameter and silently ignores unsupported ones. So an
option is offered only if it is known to work; requests with other options are rejected.
"""

from collections.abc import Mapping
from typing import Final

from penstock.executor.trtllm.config import (
    DecodingType,
    GuidedDecodingBackend,
    SamplerOption,
    SamplerType,
    SpeculativeSettings,
    TrtllmConfig,
)
from penstock.executor.trtllm.package import Package
from penstock.scheduler.executor import Feature

HONOURED: Final[Mapping[SamplerType, frozenset[SamplerOption]]] = {
    # The default of release 1.2. It ignores the three penalties (NVIDIA issue #9442; PR #16485 adds
    # them, which `Package.honours_penalties` reports), the seed (one generator for all requests; PR
    # #17172) and min_p (PR #16590). Its check for early ends counts the prompt too, so that
    # min_tokens has no effect.
    SamplerType.TORCH: frozenset(),
    # The older C++ sampler: supports all of these, except with speculative decoding, but no log
    # probabilities. Deprecated, removed in 1.4.
    SamplerType.TRTLLM: frozenset(SamplerOption),
}
"""For each sampler, the options in SamplerOption that it supports in release 1.2."""

GUIDED: Final[Mapping[GuidedDecodingBackend, frozenset[Feature]]] = {
    # Reads GBNF, the dialect of Penstock's API.
    GuidedDecodingBackend.XGRAMMAR: frozenset(
        {Feature.JSON_SCHEMA, Feature.REGEX, Feature.GRAMMAR, Feature.CHOICE}
    ),
    # Its grammars use a dialect of Lark, in which EBNF is an error or has another meaning, and its
    # regular expressions use Rust's dialect: dead ends of both cannot be found here.
    GuidedDecodingBackend.LLGUIDANCE: frozenset({Feature.JSON_SCHEMA, Feature.CHOICE}),
}
"""The constraints that each guided decoding backend can enforce."""

_FEATURES: Final[Mapping[SamplerOption, Feature]] = {
    SamplerOption.PENALTIES: Feature.PENALTIES,
    SamplerOption.SEED: Feature.SEED,
    SamplerOption.MIN_TOKENS: Feature.MIN_TOKENS,
    SamplerOption.MIN_P: Feature.MIN_P,
}


def honoured_options(config: TrtllmConfig, package: Package) -> frozenset[SamplerOption]:
    """Return the options in SamplerOption that the engine supports: by the table HONOURED, by
    detection, or by the setting `sampler_honours`.

    With speculative decoding, only the setting is used, because it depends on the drafting method
    whether accepted tokens follow a request's options.
    """
    asserted = frozenset(config.sampler_honours)
    if config.speculative_config is not None:
        return asserted
    sampler = SamplerType.TORCH if config.sampler_type is SamplerType.AUTO else config.sampler_type
    detected = {SamplerOption.PENALTIES} if package.honours_penalties else set[SamplerOption]()
    return asserted | HONOURED[sampler] | detected


def offered_features(config: TrtllmConfig, package: Package) -> frozenset[Feature]:
    """Return the features of this executor under `config`.

    PROMPT_LOGPROBS is never offered, because the log probabilities that the PyTorch backend returns
    for a prompt omit the prompt's own tokens.
    """
    honoured = honoured_options(config, package)
    features = {_FEATURES[option] for option in honoured}
    if not _samples_inside_model(config.speculative_config):
        features |= {Feature.LOGPROBS, Feature.LOGIT_BIAS}
    if package.runs_engines or config.sampler_type is SamplerType.TRTLLM:
        # In the TensorRT backend, aborted streams with log probabilities end the process (NVIDIA
        # issue #10810). TRTLLMSampler returns only the chosen token, always as the most likely one.
        features.discard(Feature.LOGPROBS)
    if config.guided_decoding_backend is not None:
        features |= GUIDED[config.guided_decoding_backend]
    if config.lora_config.adapters:
        features.add(Feature.ADAPTERS)
    if config.kv_cache_config.enable_block_reuse:
        features.add(Feature.CACHE_RETENTION)
    return frozenset(features)


def _samples_inside_model(settings: SpeculativeSettings | None) -> bool:
    """Return whether tokens are sampled inside the model's forward pass, where logit bias and log
    probabilities are not supported.
    """
    if settings is None:
        return False
    if settings.decoding_type is DecodingType.EAGLE:
        return settings.eagle3_one_model
    return settings.decoding_type is DecodingType.MTP
