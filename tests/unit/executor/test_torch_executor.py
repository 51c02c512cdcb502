"""Edge cases of the torch executor, such as failures of single requests, prompt log probabilities
and limits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.executor import TorchExecutor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Completed, Failed, StepEvents
from penstock.scheduler.executor import ExecutorDied, Feature
from penstock.scheduler.request import FailureReason, RequestSpec, SamplingParams
from support.core import FakeClock, ends, make_spec, outputs, run_until_idle
from support.torch_models import MAX_SEQ_LEN, VOCAB_SIZE, NaiveModel, save_tiny_model
from unit.executor.torch_paths import PATHS, PathName, build_by

POISON = 4
"""A token whose embedding is NaN."""
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def naive(folder: Path) -> NaiveModel:
    return NaiveModel(folder)


def make_engine(
    folder: Path, *, budget: int = 64, dtype: str = "auto", by: PathName = "eager"
) -> Engine:
    executor = build_by(
        by,
        ExecutorConfig(model_path=folder, dtype=dtype, max_num_seqs=min(4, budget), num_blocks=24),
    )
    return Engine(executor, SchedulerConfig(max_num_batched_tokens=budget), FakeClock())


def poison(engine: Engine) -> None:
    executor = engine.executor
    assert isinstance(executor, TorchExecutor)
    module: Any = executor._model.module
    module.get_input_embeddings().weight.data[POISON] = math.nan


def prompt(seed: int, length: int) -> list[int]:
    tokens = np.random.default_rng(seed).integers(3, VOCAB_SIZE, length)
    tokens[tokens == POISON] = POISON + 1
    ids: list[int] = tokens.tolist()
    return ids


def spec(key: int, ids: Sequence[int], sampling: SamplingParams = GREEDY) -> RequestSpec:
    return make_spec(key, ids, max_tokens=8, block_size=16, sampling=sampling)


def run(engine: Engine, specs: Sequence[RequestSpec]) -> list[StepEvents]:
    for one in specs:
        engine.submit((one,))
    return run_until_idle(engine)


@pytest.mark.parametrize("place", [0, 20, 49], ids=["first", "middle", "last"])
@pytest.mark.parametrize("by", PATHS)
def test_a_poisoned_request_fails_alone_without_later_effects(
    by: PathName, place: int, folder: Path, naive: NaiveModel
) -> None:
    # With 24 blocks, a later request gets the blocks of the one that failed.
    engine = make_engine(folder, by=by)
    poison(engine)
    bad = prompt(9, 50)
    bad[place] = POISON
    good = {key: prompt(key, length) for key, length in ((1, 40), (2, 7), (3, 60))}

    for turn in range(3):
        reported = run(
            engine,
            [
                *(spec(key + 10 * turn, ids) for key, ids in good.items()),
                spec(9 + 10 * turn, bad),
            ],
        )
        found = ends(reported)
        end = found.pop(9 + 10 * turn)
        assert isinstance(end, Failed)
        assert end.reason is FailureReason.EXECUTOR_REQUEST_FAILED
        assert all(isinstance(other, Completed) for other in found.values())
        tokens = outputs(reported)
        for key, ids in good.items():
            generated = tokens[key + 10 * turn]
            # A model that samples the poisoned token would rightly fail; this one does not.
            assert POISON not in generated
            assert naive.is_greedy(ids, generated)


@pytest.fixture(scope="module")
def overflowing(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a model whose last layer computes an overflowing value for token POISON. The key of
    this token and all other values are finite.
    """
    module: Any = AutoModelForCausalLM.from_pretrained(folder)
    layers = module.model.layers
    with torch.inference_mode():
        module.model.embed_tokens.weight[:, 0] = 0
        module.model.embed_tokens.weight[POISON] = 0
        module.model.embed_tokens.weight[POISON, 0] = 8_000
        for layer in layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        layers[-1].self_attn.k_proj.weight[:, 0] = 0
        layers[-1].self_attn.v_proj.weight[:, 0] = 0
        layers[-1].self_attn.v_proj.weight[3, 0] = 3.3e38
    edited = tmp_path_factory.mktemp("overflowing")
    module.save_pretrained(edited)
    return edited


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["runs on", "cancelled"])
@pytest.mark.parametrize("by", PATHS)
def test_a_value_that_overflows_in_a_middle_chunk_harms_no_other(
    by: PathName, is_cancelled: bool, overflowing: Path
) -> None:
    engine = make_engine(overflowing, budget=32, by=by)
    bad = prompt(9, 90)
    bad[5] = bad[11] = POISON
    engine.submit((spec(1, bad),))

    first = engine.step()
    if is_cancelled:
        engine.cancel(1)
    reported = [first, *run_until_idle(engine)]
    later = [spec(key, prompt(key, 3)) for key in range(2, 12)]
    reported += run(engine, later)

    found = ends(reported)
    end = found.pop(1)
    assert isinstance(end, Failed)
    assert end.detail == "keys or values are not finite"
    assert all(isinstance(other, Completed) for other in found.values())


@pytest.mark.parametrize("left_behind", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("by", PATHS)
def test_earlier_content_of_a_block_affects_no_request(
    by: PathName, left_behind: float, folder: Path, naive: NaiveModel
) -> None:
    # Also values that no check finds: a key that overflowed and to which its own token did not
    # attend.
    engine = make_engine(folder, budget=24, by=by)
    executor = engine.executor
    assert isinstance(executor, TorchExecutor)
    for pages in executor._pages._layers:
        pages.fill_(left_behind)
    ids = {key: prompt(key, length) for key, length in ((1, 1), (2, 16), (3, 17), (4, 70), (5, 31))}

    reported = run(engine, [spec(key, tokens) for key, tokens in ids.items()])

    tokens = outputs(reported)
    assert all(naive.is_greedy(ids[key], tokens[key]) for key in ids)


@pytest.mark.parametrize(
    "wrong",
    [
        SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),)),
        SamplingParams(logit_bias=((-1, 1.0),)),
        SamplingParams(logit_bias=((4, math.nan),)),
        SamplingParams(logit_bias=((4, math.inf),)),
        SamplingParams(temperature=math.nan),
        SamplingParams(temperature=-1.0),
        SamplingParams(top_p=math.nan),
        SamplingParams(top_p=0.0),
        SamplingParams(top_k=-3),
        SamplingParams(min_p=2.0),
        SamplingParams(repetition_penalty=0.0),
        SamplingParams(frequency_penalty=math.nan),
        SamplingParams(presence_penalty=math.inf),
    ],
    ids=str,
)
def test_invalid_sampling_parameters_fail_only_their_request(
    wrong: SamplingParams, folder: Path, naive: NaiveModel
) -> None:
    engine = make_engine(folder)

    reported = run(engine, [spec(1, prompt(1, 30)), spec(2, prompt(2, 30), wrong)])

    assert isinstance(ends(reported)[2], Failed)
    assert naive.is_greedy(prompt(1, 30), outputs(reported)[1])


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31 - 1])
@pytest.mark.parametrize("by", PATHS)
def test_an_impossible_prompt_token_fails_alone(
    by: PathName, token: int, folder: Path, naive: NaiveModel
) -> None:
    engine = make_engine(folder, by=by)

    reported = run(engine, [spec(1, prompt(1, 30)), spec(2, [*prompt(2, 30), token, 5])])

    assert isinstance(ends(reported)[2], Failed)
    assert naive.is_greedy(prompt(1, 30), outputs(reported)[1])


def test_a_logit_bias_does_not_affect_the_next_request(folder: Path, naive: NaiveModel) -> None:
    engine = make_engine(folder)
    biased = SamplingParams(temperature=0.0, logit_bias=((50, 1e4),))

    first = run(engine, [spec(key, prompt(key, 10), biased) for key in range(1, 5)])
    second = run(engine, [spec(key, prompt(key, 10)) for key in range(11, 15)])

    assert all(set(tokens) == {50} for tokens in outputs(first).values())
    assert all(naive.is_greedy(prompt(key, 10), out) for key, out in outputs(second).items())


@pytest.mark.parametrize("budget", [16, 2048], ids=["chunked", "whole"])
@pytest.mark.parametrize("by", PATHS)
def test_prompt_logprobs_are_the_naive_ones(
    by: PathName, budget: int, folder: Path, naive: NaiveModel
) -> None:
    engine = make_engine(folder, budget=budget, by=by)
    asking = SamplingParams(temperature=0.0, num_prompt_logprobs=3)
    ids = {1: prompt(1, 50), 2: prompt(2, 1), 3: prompt(3, 17)}
    specs = [
        make_spec(key, tokens, max_tokens=4, hashed=False, sampling=asking)
        for key, tokens in ids.items()
    ]

    reported = run(engine, [*specs, spec(4, prompt(4, 20))])

    seen: dict[tuple[int, int], tuple[float, int, list[int]]] = {}
    for events in reported:
        for key, first, part in events.prompt_logprobs:
            for row in range(len(part.chosen)):
                place = (key, first + row)
                assert place not in seen
                seen[place] = (
                    float(part.chosen[row]),
                    int(part.ranks[row]),
                    part.top_ids[row].tolist(),
                )
    assert set(seen) == {(key, p) for key, tokens in ids.items() for p in range(1, len(tokens))}
    for key, tokens in ids.items():
        logits = naive.logits(tokens).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        for position in range(1, len(tokens)):
            before = logprobs[position - 1]
            chosen, rank, top_ids = seen[key, position]
            assert chosen == pytest.approx(before[tokens[position]], abs=1e-3)
            assert rank == (before > before[tokens[position]]).sum() + 1
            assert top_ids == np.argsort(-before)[:3].tolist()


@pytest.mark.parametrize("budget", [1, 7], ids=["token by token", "small chunks"])
@pytest.mark.parametrize("by", PATHS)
def test_half_precision_runs_steps_that_sample_nothing(
    by: PathName, budget: int, folder: Path
) -> None:
    engine = make_engine(folder, budget=budget, dtype="bfloat16", by=by)

    reported = run(engine, [spec(1, prompt(1, 30)), spec(2, prompt(2, 3))])

    assert {key: len(tokens) for key, tokens in outputs(reported).items()} == {1: 8, 2: 8}


@pytest.mark.parametrize(
    ("by", "dtype"), [("eager", "bfloat16"), ("eager", "float16"), ("fused", "bfloat16")]
)
def test_half_precision_repeats_itself_on_used_blocks(
    by: PathName, dtype: str, folder: Path
) -> None:
    engine = make_engine(folder, dtype=dtype, by=by)
    sampling = SamplingParams(temperature=1.0, seed=3)
    generated: list[list[int]] = []
    for key in range(1, 9):
        # Another request leaves its keys in the blocks, a longer one each time.
        run(engine, [spec(100 + key, prompt(key, 3 * key))])
        reported = run(engine, [spec(key, [5, 6, 7], sampling=sampling)])
        generated.append(outputs(reported)[key])
    assert generated == [generated[0]] * len(generated)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("penalty", [1e-40, 1e-10, 1e-4])
def test_a_tiny_penalty_is_unusual_and_no_failure(penalty: float, dtype: str, folder: Path) -> None:
    engine = make_engine(folder, dtype=dtype)
    odd = SamplingParams(temperature=1.0, repetition_penalty=penalty, num_logprobs=2)
    reported = run(engine, [spec(1, prompt(1, 9), odd), spec(2, prompt(1, 9))])
    assert {key: len(tokens) for key, tokens in outputs(reported).items()} == {1: 8, 2: 8}


def test_a_poisoned_token_is_detected_in_prefill_of_one_token(folder: Path) -> None:
    engine = make_engine(folder, budget=1)
    poison(engine)
    engine.submit((spec(1, [5, POISON, 6, 7, 8]),))

    assert engine.step().ends == ()
    (end,) = engine.step().ends
    assert isinstance(end, Failed)


def test_info_shows_what_was_built(folder: Path) -> None:
    info = TorchExecutor(
        ExecutorConfig(model_path=folder, max_num_seqs=3, max_seq_len=100_000, block_size=32)
    ).info

    assert info.vocab_size == VOCAB_SIZE
    assert info.max_seq_len == MAX_SEQ_LEN
    # Memory for far more, and no use for it.
    assert info.num_blocks == 3 * MAX_SEQ_LEN // 32
    assert info.features == {
        Feature.SEED,
        Feature.MIN_P,
        Feature.MIN_TOKENS,
        Feature.LOGPROBS,
        Feature.PROMPT_LOGPROBS,
        Feature.LOGIT_BIAS,
        Feature.PENALTIES,
    }


def test_blocks_follow_from_bytes(folder: Path) -> None:
    # 2 layers, keys and values, 2 heads of 16 elements of 4 bytes, 16 tokens.
    bytes_each = 2 * 2 * 2 * 16 * 4 * 16
    config = ExecutorConfig(model_path=folder, kv_cache_bytes=10 * bytes_each + 1)

    assert TorchExecutor(config).info.num_blocks == 10


def test_bytes_for_less_than_a_block_are_rejected(folder: Path) -> None:
    with pytest.raises(ValueError, match="kv_cache_mib must hold a block"):
        TorchExecutor(ExecutorConfig(model_path=folder, kv_cache_bytes=100))


def test_a_pipeline_depth_of_two_is_rejected(folder: Path) -> None:
    with pytest.raises(ValueError, match="pipeline_depth"):
        TorchExecutor(ExecutorConfig(model_path=folder, device="cuda", pipeline_depth=2))


def test_a_closed_executor_rejects_steps(folder: Path) -> None:
    engine = make_engine(folder)
    engine.close()
    engine.close()

    engine.submit((spec(1, [5, 6]),))
    with pytest.raises(ExecutorDied):
        engine.step()


def test_a_model_that_breaks_kills_the_executor(folder: Path) -> None:
    engine = make_engine(folder)
    executor = engine.executor
    assert isinstance(executor, TorchExecutor)

    def fail(*_args: object, **_kwargs: object) -> object:
        raise RuntimeError("device lost")

    executor._model.module.forward = fail
    engine.submit((spec(1, [5, 6]),))
    with pytest.raises(ExecutorDied, match="device lost"):
        engine.step()


def test_the_resources_of_the_machine_are_reported(folder: Path) -> None:
    executor = TorchExecutor(ExecutorConfig(model_path=folder, num_blocks=8))

    reported = executor.info.resources

    dtype = str(executor._model.dtype).removeprefix("torch.")
    assert re.match(rf"CPU, \d+ threads?, {dtype}, eager path,", reported)
    assert "weights " in reported
    assert "KV cache " in reported
