"""Every executor keeps its contract with the scheduler. The tests are the same for all executors
and run them through the engine.

An executor is compared with itself: a request must give the same result in any batch as when it
runs alone, in one chunk, on fresh blocks. To test an executor, add a line to CASES.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.executor.config import ExecutorConfig, ExecutorKind, SimulatedConfig
from penstock.executor.fault import Fault, FaultKind
from penstock.executor.trtllm.config import SamplerType, TrtllmConfig
from penstock.executor.trtllm.executor import TrtllmExecutor
from penstock.scheduler.events import Completed, Failed
from penstock.scheduler.executor import ExecutorDied, Feature
from penstock.scheduler.request import (
    FailureReason,
    FinishReason,
    RequestSpec,
    SamplingParams,
)
from support.core import BLOCK_SIZE, make_spec
from support.executor_runs import CheckedExecutor, Harness
from support.trtllm_engine import stepped_by_hand
from support.trtllm_folders import hugging_face_folder

VOCAB = 96
POISON = 95
"""A token id at which every executor of this suite fails only the request."""
BREAKER = 94
"""A token id in a prompt that makes every step with its request raise."""
GREEDY = SamplingParams(temperature=0.0)


def simulated(depth: int) -> Callable[[Path], ExecutorConfig]:
    faults = (
        Fault(kind=FaultKind.NOT_FINITE, at_prompt_token=POISON, max_times=1000),
        Fault(kind=FaultKind.STEP_RAISES, at_prompt_token=BREAKER, max_times=1000),
    )

    def config(_folder: Path) -> ExecutorConfig:
        return ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            pipeline_depth=depth,
            simulated=SimulatedConfig(vocab_size=VOCAB, is_strict=True, faults=faults),
        )

    return config


def torch_on_cpu(folder: Path) -> ExecutorConfig:
    return ExecutorConfig(
        kind=ExecutorKind.TORCH, model_path=folder, dtype="float32", num_threads=1
    )


def torch_eager(folder: Path) -> ExecutorConfig:
    """Return the config of the eager path, which serves models that the fused path does not."""
    return torch_on_cpu(folder)


def torch_on_cuda(depth: int) -> Callable[[Path], ExecutorConfig]:
    def config(folder: Path) -> ExecutorConfig:
        return ExecutorConfig(
            kind=ExecutorKind.TORCH,
            model_path=folder,
            dtype="float32",
            device="cuda",
            pipeline_depth=depth,
        )

    return config


def torch_eight_bit(folder: Path) -> ExecutorConfig:
    """Return the config of a CUDA executor with int8 weights and an fp8 KV cache. Its activations
    are float32, so that products do not depend on the batch.
    """
    return replace(torch_on_cuda(2)(folder), quantization="int8", kv_cache_dtype="fp8")


def trtllm(sampler: SamplerType) -> Callable[[Path], ExecutorConfig]:
    """Return a function that returns the config for the stand-in of TensorRT-LLM (tests/fakes) with
    this sampler.
    """

    def config(folder: Path) -> ExecutorConfig:
        fake_control: Any = importlib.import_module("tensorrt_llm.fake_control")
        fake_control.configure(fail_tokens=[POISON, BREAKER], step_s=0.002)
        return ExecutorConfig(
            kind=ExecutorKind.TRTLLM,
            model_path=hugging_face_folder(folder, vocab_size=VOCAB, max_position_embeddings=64),
            trtllm=TrtllmConfig(sampler_type=sampler),
        )

    return config


def has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the torch extra is not installed"
)
needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="needs a CUDA device")]
ON_CUDA = {depth: torch_on_cuda(depth) for depth in (1, 2)}
CASES = [
    pytest.param(simulated(1), id="simulated"),
    pytest.param(simulated(2), id="simulated-depth-2"),
    pytest.param(trtllm(SamplerType.TRTLLM), id="trtllm"),
    pytest.param(trtllm(SamplerType.TORCH), id="trtllm-torch-sampler"),
    pytest.param(torch_on_cpu, id="torch", marks=needs_torch),
    pytest.param(torch_eager, id="torch-eager", marks=needs_torch),
    pytest.param(ON_CUDA[1], id="torch-cuda", marks=needs_cuda),
    pytest.param(ON_CUDA[2], id="torch-cuda-depth-2", marks=needs_cuda),
    pytest.param(torch_eight_bit, id="torch-cuda-8-bit", marks=needs_cuda),
]


@pytest.fixture(params=CASES)
def harness(request: pytest.FixtureRequest, tmp_path: Path, fake_trtllm: None) -> Iterator[Harness]:
    make: Callable[[Path], ExecutorConfig] = request.param
    folder = tmp_path
    if make in (torch_on_cpu, torch_eager, torch_eight_bit, *ON_CUDA.values()):
        folder = request.getfixturevalue("make_tiny_llama")(VOCAB, POISON)
    if make is torch_eager:
        from penstock.executor.torch.executor import TorchExecutor

        built = Harness(make(folder), TorchExecutor)
    else:
        built = Harness(make(folder))
    yield built
    built.close()


def prompt_of(length: int, start: int = 0) -> NDArray[np.int32]:
    """Return ids int32 [length] that do not contain POISON and differ between values of `start`."""
    return np.array([(7 * i + 3 * start + start * i) % 90 for i in range(length)], dtype=np.int32)


def spec_of(key: int, prompt: NDArray[np.int32], **fields: Any) -> RequestSpec:
    """Return a greedy request. Its blocks are not hashed, and so not shared, unless `fields` sets
    `hashed`.
    """
    defaults: dict[str, Any] = {"max_tokens": 10, "hashed": False, "sampling": GREEDY}
    return make_spec(key, prompt.tolist(), **(defaults | fields))


def crowd(count: int = 6, **fields: Any) -> list[RequestSpec]:
    return [
        spec_of(i + 1, prompt_of(1 + 5 * i, i), max_tokens=3 + 2 * i, **fields)
        for i in range(count)
    ]


def needs(harness: Harness, feature: Feature) -> None:
    if feature not in harness.executor().info.features:
        pytest.skip(f"the executor does not offer {feature.value}")


def arm(executor: CheckedExecutor) -> CheckedExecutor:
    """Return the executor. If it is the torch executor, make the token BREAKER break its steps;
    other executors have a setting for that.
    """
    if executor.info.name == "torch":
        from support.torch_fault_injector import for_prompt_token, inject_fault

        inject_fault(executor.inner, for_prompt_token(BREAKER))
    return executor


def tokens_alone(harness: Harness, specs: list[RequestSpec]) -> list[list[int]]:
    return [harness.run(spec)[0].tokens for spec in specs]


def test_the_executor_info_matches_the_configuration(harness: Harness) -> None:
    executor = harness.executor(num_blocks=20, max_num_seqs=3)
    info = executor.info

    assert info.name
    assert info.vocab_size == VOCAB
    assert (info.block_size, info.num_blocks, info.max_num_seqs) == (BLOCK_SIZE, 20, 3)
    assert 1 <= info.max_seq_len <= 64
    assert info.pipeline_depth in (1, 2)
    assert all(isinstance(feature, Feature) for feature in info.features)
    assert (executor.ready_fd is not None) == info.is_self_paced


def test_a_request_generates_max_tokens(harness: Harness) -> None:
    (outcome,) = harness.run(spec_of(1, prompt_of(5), max_tokens=7))

    assert len(outcome.tokens) == 7
    assert isinstance(outcome.end, Completed)
    assert outcome.end.reason is FinishReason.LENGTH


def iteration_of(executor: CheckedExecutor) -> Callable[[], None] | None:
    """Return a function that runs one iteration of a self-paced executor, so that the executor does
    not run ahead of the scheduler; None for other executors.
    """
    if isinstance(executor.inner, TrtllmExecutor):
        return stepped_by_hand(executor.inner)
    return None


def test_requests_in_a_changing_batch_get_the_same_output_as_alone(harness: Harness) -> None:
    specs = crowd()
    executor = harness.executor()

    together = harness.run(
        *specs, stagger=True, executor=executor, after_step=iteration_of(executor)
    )

    assert executor.max_rows > 1
    assert [outcome.tokens for outcome in together] == tokens_alone(harness, specs)


def test_chunked_prefill_does_not_change_outputs(harness: Harness) -> None:
    specs = crowd()
    executor = harness.executor(max_num_seqs=3)

    chunked = harness.run(*specs, budget=5, executor=executor)

    # A self-paced executor chunks prompts itself, which is not observable.
    assert executor.info.is_self_paced or executor.num_prefill_rows > len(specs)
    assert [outcome.tokens for outcome in chunked] == tokens_alone(harness, specs)


def test_slots_and_blocks_are_reused(harness: Harness) -> None:
    specs = crowd()

    squeezed = harness.run(*specs, max_num_seqs=1, num_blocks=10)

    assert [outcome.tokens for outcome in squeezed] == tokens_alone(harness, specs)


def test_preemption_does_not_change_outputs(harness: Harness) -> None:
    specs = [spec_of(i + 1, prompt_of(8, i), max_tokens=16) for i in range(4)]

    executor = harness.executor(num_blocks=12)
    squeezed = harness.run(*specs, executor=executor, after_step=iteration_of(executor))

    assert sum(outcome.num_preemptions for outcome in squeezed) > 0
    assert [outcome.tokens for outcome in squeezed] == tokens_alone(harness, specs)


def test_prefix_cache_hits_do_not_change_outputs(harness: Harness) -> None:
    stem = prompt_of(14)
    specs = [
        spec_of(i + 1, np.concatenate((stem, prompt_of(1 + i, i + 3))), hashed=True)
        for i in range(4)
    ]

    shared = harness.run(*specs, stagger=True)

    assert [outcome.num_cached_tokens for outcome in shared[1:]] == [12, 12, 12]
    assert [outcome.tokens for outcome in shared] == tokens_alone(harness, specs)


def test_sampling_depends_on_the_seed_and_never_on_the_batch(harness: Harness) -> None:
    needs(harness, Feature.SEED)
    prompt = prompt_of(6)
    specs = [
        spec_of(i + 1, prompt, sampling=SamplingParams(temperature=1.0, seed=i // 2))
        for i in range(6)
    ]

    together = [outcome.tokens for outcome in harness.run(*specs, stagger=True)]

    assert together == tokens_alone(harness, specs)
    assert together[0] == together[1]
    assert together[0] != together[2]


def test_a_replayed_request_continues_where_it_was(harness: Harness) -> None:
    needs(harness, Feature.SEED)
    sampling = SamplingParams(temperature=1.0, seed=7)
    whole = spec_of(1, prompt_of(6), max_tokens=9, sampling=sampling)
    (first_life,) = harness.run(whole)
    prompt = np.array([*whole.prompt_ids, *first_life.tokens[:4]], dtype=np.int32)

    (second_life,) = harness.run(
        spec_of(2, prompt, max_tokens=9, num_replayed=4, sampling=sampling)
    )

    assert first_life.tokens == first_life.tokens[:4] + second_life.tokens


@pytest.mark.parametrize("num_stop_ids", [1, 10])
def test_stop_ids_end_a_request_but_never_before_min_tokens(
    harness: Harness, num_stop_ids: int
) -> None:
    needs(harness, Feature.MIN_TOKENS)
    if num_stop_ids > 1 and harness.executor().info.name == "trtllm":
        pytest.skip("the engine bars its one end id; docs/tensorrt-llm-mapping.md tells")
    (free,) = harness.run(spec_of(1, prompt_of(6), max_tokens=10))
    stop_ids = tuple(sorted(set(free.tokens[:num_stop_ids])))

    (bounded,) = harness.run(
        spec_of(2, prompt_of(6), max_tokens=10, min_tokens=4, stop_ids=stop_ids)
    )

    assert isinstance(bounded.end, Completed)
    assert not set(bounded.tokens[:4]) & set(stop_ids)
    is_stopped = bounded.end.reason is FinishReason.STOP
    assert is_stopped == (bounded.tokens[-1] in stop_ids)
    assert not set(bounded.tokens[4:-1]) & set(stop_ids)


@pytest.mark.parametrize("budget", [8, 256])
def test_a_failed_request_does_not_affect_others_in_its_batch(
    harness: Harness, budget: int
) -> None:
    good = crowd(4)
    poisoned = spec_of(99, np.append(prompt_of(9), np.int32(POISON)))

    *others, failed = harness.run(*good, poisoned, budget=budget)

    assert isinstance(failed.end, Failed)
    assert failed.end.reason is FailureReason.EXECUTOR_REQUEST_FAILED
    assert failed.tokens == []
    assert [outcome.tokens for outcome in others] == tokens_alone(harness, good)


@pytest.mark.parametrize("budget", [8, 256])
@pytest.mark.parametrize("places", [(0,), (3,), (5,), (1, 2), (0, 5)], ids=str)
def test_a_request_that_makes_the_step_raise_does_not_affect_others(
    harness: Harness, places: tuple[int, ...], budget: int
) -> None:
    """The position in the batch and the number of such requests do not matter."""
    good = crowd(4)
    specs = list(good)
    for place in places:
        prompt = np.append(prompt_of(9, place), np.int32(BREAKER))
        specs.insert(place, spec_of(90 + place, prompt))

    outcomes = harness.run(*specs, budget=budget, executor=arm(harness.executor()))

    for spec, outcome in zip(specs, outcomes, strict=True):
        if spec.key >= 90:
            assert isinstance(outcome.end, Failed)
            assert outcome.end.reason is FailureReason.EXECUTOR_REQUEST_FAILED
            assert outcome.tokens == []
    others = [o.tokens for s, o in zip(specs, outcomes, strict=True) if s.key < 90]
    assert others == tokens_alone(harness, good)


def test_blocks_of_a_failed_request_can_be_reused(harness: Harness) -> None:
    poisoned = [spec_of(90 + i, np.array([POISON] * 8, dtype=np.int32)) for i in range(2)]
    good = spec_of(1, prompt_of(20), max_tokens=12)

    outcomes = harness.run(*poisoned, good, num_blocks=8, max_num_seqs=1)

    assert [outcome.tokens for outcome in outcomes] == [[], [], *tokens_alone(harness, [good])]


def test_logprobs_match_their_tokens(harness: Harness) -> None:
    needs(harness, Feature.LOGPROBS)
    asks = SamplingParams(temperature=0.0, num_logprobs=3)
    silent, asking = spec_of(1, prompt_of(9, 1)), spec_of(2, prompt_of(6), sampling=asks)

    plain, outcome = harness.run(silent, asking)

    assert [plain.tokens, outcome.tokens] == tokens_alone(harness, [silent, asking])
    assert len(outcome.logprobs) == len(outcome.tokens)
    for token, logprobs in zip(outcome.tokens, outcome.logprobs, strict=True):
        top = logprobs.top_logprobs[0, :3]
        assert logprobs.top_ids[0, 0] == token
        assert logprobs.ranks[0] == 1
        assert logprobs.chosen[0] == pytest.approx(top[0])
        assert (np.diff(top) <= 0).all()
        assert np.exp(top).sum() <= 1.0 + 1e-5


def test_prompt_logprobs_cover_the_prompt_whatever_the_chunks(harness: Harness) -> None:
    needs(harness, Feature.PROMPT_LOGPROBS)
    asks = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
    specs = [spec_of(i + 1, prompt_of(17), hashed=True, sampling=asks) for i in range(2)]

    whole, again = harness.run(*specs, stagger=True)
    chunked = harness.run(specs[0], budget=8)[0]

    assert sorted(whole.prompt_logprobs) == list(range(1, 17))
    # Chunk borders change the rounding of scores; it is larger with keys in 8 bits.
    near = 2e-3 if harness.config.kv_cache_dtype != "auto" else 1e-4
    assert again.prompt_logprobs == pytest.approx(whole.prompt_logprobs, abs=near)
    assert chunked.prompt_logprobs == pytest.approx(whole.prompt_logprobs, abs=near)


def test_close_is_idempotent_and_final(harness: Harness) -> None:
    executor = harness.executor()
    harness.run(spec_of(1, prompt_of(3)), executor=executor)

    executor.close()
    executor.close()

    with pytest.raises(ExecutorDied):
        harness.run(spec_of(2, prompt_of(3)), executor=executor)
