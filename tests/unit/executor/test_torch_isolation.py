"""If a step of the torch executor raises, the request that causes it fails, and the others
continue.

The steps mix decode rows and prefill chunks. The greedy output of the other requests must equal the
naive model's, whichever parts of a failed step are run again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch import computed_step
from penstock.executor.torch.executor import TorchExecutor
from penstock.executor.torch.logit_edits import LogitEdits
from penstock.executor.torch.sampler import Sampled, sample
from penstock.executor.torch.slot_rules import SlotRules
from penstock.scheduler.batch import Batch
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Failed
from penstock.scheduler.executor import ExecutorDied
from penstock.scheduler.request import FailureReason, RequestSpec, SamplingParams
from penstock.scheduler.slot_arrays import SlotArrays
from support.core import FakeClock, ends, make_spec, outputs
from support.torch_differential import (
    AMPLE_BLOCKS,
    BLOCK_SIZE,
    NUM_SLOTS,
    SCARCE_BLOCKS,
    is_naive,
    mixed_specs,
    run_mixed,
)
from support.torch_fault_injector import TorchFaultInjector, for_keys
from support.torch_models import VOCAB_SIZE, NaiveModel, save_tiny_model
from unit.executor.torch_paths import PATHS, PathName, build_by

BAD = frozenset({2, 5, 6, 11})
"""Keys of the mixed requests: a chunked prompt, two of about a block that decode together, a long
one.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def naive(folder: Path) -> NaiveModel:
    return NaiveModel(folder)


def build(folder: Path, num_blocks: int = AMPLE_BLOCKS, by: PathName = "eager") -> TorchExecutor:
    return build_by(
        by,
        ExecutorConfig(
            model_path=folder, max_num_seqs=NUM_SLOTS, num_blocks=num_blocks, num_threads=1
        ),
    )


def wrong(
    naive: NaiveModel, specs: list[RequestSpec], generated: dict[int, list[int]]
) -> list[int]:
    return [one.key for one in specs if not is_naive(naive, one, generated[one.key])]


@pytest.mark.parametrize(
    ("num_blocks", "hashed"),
    [(AMPLE_BLOCKS, False), (SCARCE_BLOCKS, True)],
    ids=["ample plain", "scarce prefix"],
)
@pytest.mark.parametrize(("by", "at_output"), [("eager", 0), ("fused", 1), ("fused", 9)])
def test_a_request_that_makes_the_step_raise_fails_alone(
    by: PathName, at_output: int, hashed: bool, num_blocks: int, folder: Path, naive: NaiveModel
) -> None:
    executor = build(folder, num_blocks, by)

    def raises(batch: Batch) -> Exception | None:
        arrays = batch.arrays
        num_outputs = arrays.num_tokens[batch.slots] - arrays.num_prompt[batch.slots]
        slots = batch.slots[num_outputs >= at_output]
        return for_keys(BAD)(batch) if BAD & set(arrays.key[slots].tolist()) else None

    injector = TorchFaultInjector(executor, raises)
    specs = mixed_specs(hashed=hashed)

    reported = run_mixed(executor, specs, budget=24)

    found, generated = ends(reported), outputs(reported)
    failed = {key: end for key, end in found.items() if isinstance(end, Failed)}
    assert set(failed) == BAD
    for end in failed.values():
        assert end.reason is FailureReason.EXECUTOR_REQUEST_FAILED
        assert "IndexError at torch_fault_injector.py:" in end.detail
        assert "bounds" not in end.detail
    assert wrong(naive, [one for one in specs if one.key not in BAD], generated) == []
    for key in BAD:
        # What they got before it is right, too.
        before = generated.get(key, [])
        assert len(before) == at_output
        assert naive.is_greedy(specs[key - 1].prompt_ids.tolist(), before)
    # Parts of steps ran with decodes and chunks in one.
    assert any(len(keys) > 1 and tokens > len(keys) for keys, tokens in injector.parts)


def test_a_step_short_of_memory_is_run_in_smaller_parts(folder: Path, naive: NaiveModel) -> None:
    executor = build(folder)
    room = 40

    def raises(batch: Batch) -> Exception | None:
        num_tokens = int(batch.num_tokens.sum())
        if num_tokens <= room or batch.num_rows == 1:
            return None
        return torch.OutOfMemoryError("no room")

    injector = TorchFaultInjector(executor, raises)
    specs = mixed_specs(hashed=False)

    reported = run_mixed(executor, specs, budget=2048)

    assert wrong(naive, specs, outputs(reported)) == []
    assert any(tokens > room and len(keys) > 1 for keys, tokens in injector.parts)


@pytest.mark.parametrize("seed", range(3))
def test_case_34_random_allocation_failures_lose_no_token(
    seed: int, folder: Path, naive: NaiveModel
) -> None:
    executor = build(folder)
    random = np.random.default_rng(seed)
    injector = TorchFaultInjector(
        executor,
        lambda _batch: torch.OutOfMemoryError("no room") if random.random() < 0.03 else None,
    )
    specs = mixed_specs(hashed=True)

    reported = run_mixed(executor, specs, budget=24)

    assert injector.num_probes > 0
    assert wrong(naive, specs, outputs(reported)) == []


@pytest.mark.parametrize("by", PATHS)
def test_drawn_tokens_are_the_same_in_parts(by: PathName, folder: Path) -> None:
    drawn = SamplingParams(
        temperature=1.0, top_k=40, top_p=0.9, seed=5, num_logprobs=2, repetition_penalty=1.2
    )
    specs = mixed_specs(hashed=False, sampling=drawn)
    undisturbed = outputs(run_mixed(build(folder, by=by), specs, budget=24))
    executor = build(folder, by=by)
    TorchFaultInjector(executor, for_keys(BAD))

    reported = run_mixed(executor, specs, budget=24)

    generated = outputs(reported)
    assert set(generated) == set(undisturbed) - BAD
    assert all(tokens == undisturbed[key] for key, tokens in generated.items())


def test_case_29_a_sampler_that_raises_for_one_row_fails_that_one(
    folder: Path, naive: NaiveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edits of one row's logits raise, as they would for an invalid logit bias. The forward
    pass does not raise.
    """

    def broken(edits: LogitEdits, logits: torch.Tensor, slots: np.ndarray) -> None:
        keys = edits.arrays.key[slots]
        if 9 in keys:
            logits[int(np.flatnonzero(keys == 9)[0]), logits.shape[1] + 7] = 0.0
        real(edits, logits, slots)

    real = LogitEdits.apply
    monkeypatch.setattr(LogitEdits, "apply", broken)
    biased = SamplingParams(temperature=0.0, logit_bias=((50, 0.0),))
    specs = mixed_specs(hashed=False, sampling=biased)

    reported = run_mixed(build(folder), specs, budget=24)

    assert [key for key, end in ends(reported).items() if isinstance(end, Failed)] == [9]
    assert wrong(naive, [one for one in specs if one.key != 9], outputs(reported)) == []


def test_no_row_is_searched_for_on_a_lost_device(folder: Path) -> None:
    executor = build(folder)
    injector = TorchFaultInjector(executor, for_keys(BAD))
    injector.is_lost = True

    with pytest.raises(ExecutorDied, match="device lost"):
        run_mixed(executor, mixed_specs(hashed=False), budget=24)

    assert injector.num_probes == 1


@pytest.mark.parametrize("by", PATHS)
def test_pages_of_a_request_that_made_a_step_raise_are_cleared(by: PathName, folder: Path) -> None:
    executor = build(folder, num_blocks=4, by=by)
    TorchFaultInjector(executor, for_keys({1}))
    engine = Engine(executor, SchedulerConfig(max_num_batched_tokens=64), FakeClock())
    engine.submit((make_spec(1, 30, block_size=BLOCK_SIZE, hashed=False),))

    (end,) = engine.step().ends

    assert isinstance(end, Failed)
    for pages in executor._pages._layers:
        assert not pages[:4].any()


@pytest.mark.parametrize("by", PATHS)
def test_the_probe_runs_every_path_and_writes_no_block_of_requests(
    by: PathName, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sampled] = []

    def watched(
        logits: torch.Tensor,
        arrays: SlotArrays,
        slots: np.ndarray,
        positions: np.ndarray,
        rules: SlotRules,
    ) -> Sampled:
        seen.append(sample(logits, arrays, slots, positions, rules))
        return seen[-1]

    executor = build(folder, num_blocks=8, by=by)
    monkeypatch.setattr(computed_step, "sample", watched)

    with torch.inference_mode():
        executor._recover(RuntimeError("once"))

    (sampled,) = seen
    assert sampled.is_good.all()
    assert ((sampled.tokens >= 0) & (sampled.tokens < VOCAB_SIZE)).all()
    for pages in executor._pages._layers:
        assert not pages[:8].any()
        assert pages[8:].flatten(1).any(1).all()


@pytest.mark.parametrize("max_seq_len", [2, 3])
def test_a_probe_fits_the_shortest_model(max_seq_len: int, folder: Path) -> None:
    executor = TorchExecutor(
        ExecutorConfig(model_path=folder, max_num_seqs=1, num_blocks=1, max_seq_len=max_seq_len)
    )

    with torch.inference_mode():
        executor._recover(RuntimeError("once"))
