"""Creates request specs, and the engine's arguments that the request mapping derives from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.executor.trtllm.config import (
    AdapterConfig,
    GuidedDecodingBackend,
    KvCacheSettings,
    LoraSettings,
    SamplerOption,
    TrtllmConfig,
)
from penstock.executor.trtllm.package import Package
from penstock.executor.trtllm.request_mapping import RequestMapping
from penstock.scheduler.request import Constraint, ConstraintKind, RequestSpec, SamplingParams
from support.core import make_spec
from unit.executor.trtllm_recorder import RecordedArguments, recording_package

VOCAB = 1000
NO_REUSE = KvCacheSettings(enable_block_reuse=False)
FULL = TrtllmConfig(
    sampler_honours=tuple(SamplerOption),
    guided_decoding_backend=GuidedDecodingBackend.XGRAMMAR,
    lora_config=LoraSettings(
        adapters=(
            AdapterConfig(name="law", path=Path("/loras/law"), id=1),
            AdapterConfig(name="tax", path=Path("/loras/tax"), id=7),
        )
    ),
)
"""Offers every feature that this executor supports."""


def mapping(config: TrtllmConfig = FULL, package: Package | None = None) -> RequestMapping:
    return RequestMapping(config, package or recording_package(), VOCAB)


def spec(prompt: list[int] | None = None, **changes: Any) -> RequestSpec:
    return replace(make_spec(1, prompt or [5, 6, 7], max_tokens=20), **changes)


def arguments(
    asked: RequestSpec, output: list[int] | None = None, engine: RequestMapping | None = None
) -> dict[str, Any]:
    """Return the engine's arguments for a request that has already generated the tokens
    `output`.
    """
    tokens = np.concatenate([asked.prompt_ids, np.array(output or [], dtype=np.int32)])
    return (engine or mapping()).arguments(asked, tokens)


def params(asked: RequestSpec, output: list[int] | None = None, **kwargs: Any) -> RecordedArguments:
    made: RecordedArguments = arguments(asked, output, **kwargs)["sampling_params"]
    return made


def sampled(**changes: Any) -> RequestSpec:
    return spec(sampling=SamplingParams(**changes))


def constrained(kind: ConstraintKind, *texts: str, **changes: Any) -> RequestSpec:
    options: dict[str, Any] = {"stop_ids": (2,)} | changes
    return spec(constraint=Constraint(kind=kind, texts=texts), **options)
