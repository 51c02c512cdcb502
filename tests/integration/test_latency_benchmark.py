"""`benchmarks/latency_target.py`: as a process, and what its figures are counted with."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("latency_run")


def test_everything_is_told_in_one_run(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [
            *(sys.executable, str(FOLDER / "latency_target.py"), "--duration-s", "40"),
            *("--plant", "linear", "--plant", "erratic"),
            *("--json", str(result), "--report", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )

    assert done.returncode == 0, done.stderr
    document = json.loads(result.read_text(encoding="utf-8"))
    linear, erratic = document["results"]
    assert [linear["plant"], erratic["plant"]] == ["linear", "erratic"]
    assert linear["best_tokens"] == 1024
    assert linear["best_p99_ms"] < linear["itl_p99_ms"] < 44.0 < linear["default_p99_ms"]
    assert linear["prefill_per_s"] > linear["best_prefill_per_s"]
    assert erratic["best_tokens"] is None
    assert (erratic["end_budget"], erratic["end_limit"]) == (2048, 256)
    names = [check["name"].split(":")[0] for check in document["checks"]]
    assert set(names) == {"linear", "erratic"}
    text = (tmp_path / "latency_target.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 4


@pytest.mark.parametrize(
    ("values", "count"),
    [([], 0), ([5, 5, 5], 0), ([1, 2, 2, 3], 0), ([1, 3, 3, 2], 1), ([2, 1, 2, 2, 1, 1], 2)],
)
def test_a_turn_is_a_change_of_direction(module: Any, values: list[int], count: int) -> None:
    assert module.turns(np.array(values, dtype=np.int64)) == count


def test_a_run_is_the_same_every_time(module: Any) -> None:
    plants = {plant.name: plant for plant in importlib.import_module("latency_plants").PLANTS}
    config = module.SchedulerConfig(target_itl_s=0.04)
    first, again = (module.drive(plants["noisy"], config, 3.0) for _ in range(2))

    assert first.step_s.tolist() == again.step_s.tolist()
    assert first.budget.tolist() == again.budget.tolist()


def test_the_load_is_followed_and_the_tokens_are_timed(module: Any) -> None:
    plants = {plant.name: plant for plant in importlib.import_module("latency_plants").PLANTS}
    run = module.drive(plants["load"], module.SchedulerConfig(), 12.0)
    ends = [int(run.num_decodes[run.within(0.0, share)][-1]) for share in (0.3, 0.63, 1.0)]

    assert ends[0] in range(28, 33)
    assert ends[1] in range(190, 201)
    assert ends[2] in range(28, 33)
    # Who decodes gets a token a step, so that is what passes between two.
    assert float(run.itl_s.min()) >= float(run.step_s.min()) - 1e-9
    assert float(np.median(run.itl_s)) == pytest.approx(float(np.median(run.step_s)), rel=0.3)
