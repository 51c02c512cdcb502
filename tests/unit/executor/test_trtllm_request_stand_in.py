"""Requests built with stand-ins of TensorRT-LLM's classes, which validate arguments as the real
classes do.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from penstock.executor.trtllm.config import AdapterConfig, LoraSettings
from penstock.executor.trtllm.package import load_package
from penstock.executor.trtllm.request_mapping import RequestMapping
from penstock.scheduler.events import Completed
from penstock.scheduler.request import (
    CacheRetention,
    ConstraintKind,
    FinishReason,
    RequestSpec,
    SamplingParams,
)
from support.trtllm_engine import TrtllmHarness, greedy_spec, reference
from unit.executor.trtllm_requests import FULL, VOCAB, arguments, constrained, sampled, spec

pytestmark = pytest.mark.usefixtures("fake_trtllm")

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the torch extra is not installed"
)


def engine(folder: Path) -> RequestMapping:
    """Return the request mapping of an engine with every optional feature and one LoRA adapter. The
    adapter's files are in `folder`.
    """
    adapters = LoraSettings(adapters=(AdapterConfig(name="law", path=folder, id=1),))
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

    reported = arguments(asked, engine=engine(tmp_path))
    inspect.signature(LLM.generate_async).bind(None, **reported)
    assert isinstance(reported["sampling_params"], SamplingParams)


def test_retention_is_made_of_the_classes_that_the_engine_knows(tmp_path: Path) -> None:
    from tensorrt_llm.llmapi.llm_configs import KvCacheRetentionConfig

    reported = arguments(ASKED["retained"], engine=engine(tmp_path))["kv_cache_retention_config"]
    assert isinstance(reported, KvCacheRetentionConfig)
    (prompt,) = reported.token_range_retention_configs
    assert isinstance(prompt, KvCacheRetentionConfig.TokenRangeRetentionConfig)
    assert (prompt.priority, prompt.duration_ms) == (80, timedelta(seconds=60))


def test_an_adapter_without_its_folder_is_rejected_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lora_path"):
        engine(tmp_path / "gone")


@pytest.mark.parametrize("later_stops", [(), (4095,)], ids=["end id", "stop id"])
def test_the_stand_in_stops_at_our_end_ids(tmp_path: Path, later_stops: tuple[int, ...]) -> None:
    """The last of `stop_ids` becomes the engine's end id. Like any other stop id, it ends the
    output and is contained in it.
    """
    harness = TrtllmHarness(tmp_path, is_free=True)
    prompt = [5, 6, 7]
    free = reference(harness, prompt, 6)
    harness.submit(greedy_spec(1, prompt, max_tokens=6, stop_ids=(free[2], *later_stops)))
    harness.run_free()
    harness.close()

    end = harness.outcomes[1].end
    assert isinstance(end, Completed)
    assert (end.reason, end.stop_id) == (FinishReason.STOP, free[2])
    assert harness.tokens(1) == free[:3]
