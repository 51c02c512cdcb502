"""Requests built with the stand-in's classes, which validate arguments as the real ones do."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.executor.trtllm.config import Adapter, LoraSettings
from penstock.executor.trtllm.package import load_package
from penstock.executor.trtllm.request_mapping import RequestMapping
from penstock.scheduler.request import CacheRetention, ConstraintKind, RequestSpec, SamplingParams
from support.fake_trtllm import FakeEngines, tokens_of
from support.fake_trtllm import fake_engines as fake_engines  # a fixture
from support.fake_trtllm import fake_trtllm as fake_trtllm  # a fixture
from support.trtllm_requests import FULL, VOCAB, arguments, constrained, sampled, spec

pytestmark = pytest.mark.usefixtures("fake_trtllm")

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the torch extra is not installed"
)


def engine(folder: Path) -> RequestMapping:
    """Provide an engine with every optional feature, and one adapter whose folder exists."""
    adapters = LoraSettings(adapters=(Adapter(name="law", path=folder, id=1),))
    return RequestMapping(replace(FULL, lora_config=adapters), load_package(), VOCAB)


PENALISED = SamplingParams(
    min_p=0.1, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, num_logprobs=0
)
ASKED = {
    "plain": spec(),
    "greedy": sampled(temperature=0.0),
    "penalised": spec(sampling=PENALISED, min_tokens=3, stop_ids=(30, 2)),
    "biased": sampled(logit_bias=((3, -100.0),)),
    "adapted": spec(adapter="law"),
    "retained": spec(retention=CacheRetention(level=80, duration_s=60.0)),
    **{kind.name: constrained(kind, "{}") for kind in ConstraintKind},
}


@needs_torch
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
def test_the_stand_in_takes_every_kind_of_request(asked: RequestSpec, tmp_path: Path) -> None:
    from tensorrt_llm import LLM, SamplingParams

    told = arguments(asked, engine=engine(tmp_path))
    inspect.signature(LLM.generate_async).bind(None, **told)
    assert isinstance(told["sampling_params"], SamplingParams)


def test_retention_is_made_of_the_classes_that_the_engine_knows(tmp_path: Path) -> None:
    from tensorrt_llm.llmapi import KvCacheRetentionConfig

    told = arguments(ASKED["retained"], engine=engine(tmp_path))["kv_cache_retention_config"]
    assert isinstance(told, KvCacheRetentionConfig)
    (prompt,) = told.token_range_retention_configs
    assert isinstance(prompt, KvCacheRetentionConfig.TokenRangeRetentionConfig)
    assert (prompt.priority, prompt.duration_ms) == (80, timedelta(seconds=60))


def test_an_adapter_without_its_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lora_path"):
        engine(tmp_path / "gone")


async def test_the_stand_in_stops_at_our_end_ids(fake_engines: FakeEngines, tmp_path: Path) -> None:
    """By the end id and by a stop id; the output contains the token that stopped it."""
    llm, requests = fake_engines.build(), engine(tmp_path)
    greedy = SamplingParams(temperature=0.0)
    free = spec(max_tokens=6, sampling=greedy)

    async def run(asked: RequestSpec) -> tuple[list[int], Any]:
        result = llm.generate_async(**arguments(asked, engine=requests))
        fake_engines.control.step(50)
        return await tokens_of(result), result.outputs[0]

    tokens, output = await run(free)
    assert (len(tokens), output.finish_reason) == (6, "length")
    third = tokens[2]
    at = tokens.index(third) + 1
    for stop_ids, reason in (((third,), None), ((third, 127), third)):
        stopped, output = await run(replace(free, stop_ids=stop_ids))
        assert stopped == tokens[:at]
        assert (output.finish_reason, output.stop_reason) == ("stop", reason)
