"""The torch executor compared with full forwards of the same model, token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch.executor import TorchExecutor
from penstock.scheduler.request import SamplingParams
from support.core import outputs
from support.torch_differential import (
    AMPLE_BLOCKS,
    FEATURE_SETS,
    NUM_SLOTS,
    FeatureSet,
    check_feature_set,
    mixed_specs,
    run_mixed,
)
from support.torch_models import ARCHITECTURES, NaiveModel, save_tiny_model
from unit.executor.torch_paths import PATHS, PathName, build_by

# Pairs of features, too, in the nightly tests.
WAYS = [
    pytest.param(way, marks=pytest.mark.nightly) if str(way).count("+") == 1 else way
    for way in FEATURE_SETS
]
FUSED = ("llama_tied_no_groups", "qwen2", "qwen3", "mistral_window")
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    saved: dict[str, Path] = {}

    def saved_folder(name: str) -> Path:
        if name not in saved:
            saved[name] = save_tiny_model(name, tmp_path_factory.mktemp(name))
        return saved[name]

    return saved_folder


@pytest.fixture(scope="module")
def naive(folder: Folder) -> Callable[[str], NaiveModel]:
    loaded: dict[str, NaiveModel] = {}

    def loaded_model(name: str) -> NaiveModel:
        if name not in loaded:
            loaded[name] = NaiveModel(folder(name))
        return loaded[name]

    return loaded_model


def make_executor(
    folder: Path, num_blocks: int = AMPLE_BLOCKS, by: PathName = "eager"
) -> TorchExecutor:
    return build_by(
        by, ExecutorConfig(model_path=folder, max_num_seqs=NUM_SLOTS, num_blocks=num_blocks)
    )


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("by", PATHS)
def test_llama_equals_a_full_forward(
    by: PathName, way: FeatureSet, folder: Folder, naive: Callable[[str], NaiveModel]
) -> None:
    check_feature_set(
        way, lambda blocks: make_executor(folder("llama"), blocks, by), naive("llama")
    )


@pytest.mark.parametrize(
    "way", [pytest.param(FEATURE_SETS[0], marks=pytest.mark.nightly), FEATURE_SETS[-1]], ids=str
)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "llama"])
def test_architecture_equals_a_full_forward(
    name: str, way: FeatureSet, folder: Folder, naive: Callable[[str], NaiveModel]
) -> None:
    check_feature_set(way, lambda blocks: make_executor(folder(name), blocks), naive(name))


@pytest.mark.parametrize("name", FUSED)
def test_architecture_by_the_fused_path_equals_a_full_forward(
    name: str, folder: Folder, naive: Callable[[str], NaiveModel]
) -> None:
    way = FEATURE_SETS[-1]

    check_feature_set(way, lambda blocks: make_executor(folder(name), blocks, "fused"), naive(name))


DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=11)


@pytest.mark.parametrize("by", PATHS)
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(by: PathName, folder: Folder) -> None:
    specs = mixed_specs(hashed=False, sampling=DRAWN)

    together = outputs(run_mixed(make_executor(folder("llama"), by=by), specs, budget=24))
    executor, alone = make_executor(folder("llama"), by=by), dict[int, list[int]]()
    for spec in specs:
        alone |= outputs(run_mixed(executor, [spec], budget=2048))

    assert alone == together


def test_another_seed_gives_other_tokens(folder: Folder) -> None:
    specs = mixed_specs(hashed=False, sampling=DRAWN)
    others = mixed_specs(
        hashed=False, sampling=SamplingParams(temperature=0.9, top_p=0.95, seed=12)
    )

    executor = make_executor(folder("llama"))

    some = outputs(run_mixed(executor, specs, budget=2048))
    other = outputs(run_mixed(executor, others, budget=2048))

    assert all(some[key] != other[key] for key in some)
