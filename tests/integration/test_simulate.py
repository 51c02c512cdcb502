"""Runs `penstock simulate`, and checks its tables, files, exit codes and messages on stderr."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from support.cli_process import Result, called, finished

TRACE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0,40,4
2023-11-16 18:15:47.0,80,9
2023-11-16 18:15:49.0,20,1
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE, encoding="utf-8")
    return path


Simulate = Callable[..., Result]


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Simulate:
    return partial(called, capsys, "simulate")


@pytest.mark.parametrize("policy", ["fcfs", "fair", "static", "dynamic"])
def test_a_trace_becomes_a_table_and_a_report(
    simulate: Simulate, trace: Path, tmp_path: Path, policy: str
) -> None:
    report = tmp_path / "report"

    done = simulate("--trace", trace, "--policy", policy, "--report", report)

    assert done.code == 0, done.err
    assert "requests     3 in" in done.out
    assert sorted(path.name for path in report.iterdir()) == [
        "report.html",
        "requests.csv",
        "summary.json",
    ]


def test_json_contains_what_was_simulated(simulate: Simulate, trace: Path) -> None:
    cost = {"step_s": 1.0, "prefill_token_s": 0.0, "decode_slot_s": 0.0, "context_token_s": 0.0}

    done = simulate(
        *("--trace", trace, "--json", "--policy", "fcfs", "--load", 0.5, "--block-size", 8),
        *("--cost", json.dumps(cost), "--target-ttft-s", 2, "--scheduler", '{"watermark": 0.1}'),
    )

    document = json.loads(done.out)
    # Arrivals at 0, 2 and 6 s; a step takes a second; the second request ends at 2 + 9 s.
    # Of the three, only the one of a single token has no gap longer than 0.1 s.
    assert document["figures"]["duration_s"] == 11.0
    assert document["figures"]["num_good"] == 1
    assert document["figures"]["ttft"]["mean_s"] == 1.0
    assert document["settings"]["scheduler"]["watermark"] == 0.1
    assert document["settings"]["targets"]["ttft_s"] == 2.0


def test_a_synthetic_trace_is_reproducible(simulate: Simulate) -> None:
    arguments = ("--synthetic", '{"rate_per_s": 3, "duration_s": 20, "seed": 7}', "--json")

    first, second = (json.loads(simulate(*arguments).out) for _ in range(2))

    assert first["figures"] == second["figures"]
    assert first["figures"]["num_requests"] > 20


def test_a_cost_fit_is_printed(simulate: Simulate, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    steps = [(0, 1, 10), (100, 0, 100), (50, 4, 900), (0, 9, 90), (7, 7, 7777)]
    lines = [
        json.dumps(
            {
                "num_prefill_tokens": p,
                "num_decodes": d,
                "num_context_tokens": c,
                "seconds": 0.01 + p * 1e-4 + d * 1e-3,
            }
        )
        for p, d, c in steps
    ]
    path.write_text("\n".join(lines), encoding="utf-8")

    done = simulate("--calibrate-from", path)

    assert done.code == 0, done.err
    assert json.loads(done.out)["prefill_token_s"] == pytest.approx(1e-4)
    assert "R2 1.0000" in done.err


def test_a_missing_file_exits_with_code_5(tmp_path: Path) -> None:
    done = finished("simulate", "--trace", tmp_path / "none.csv")

    assert done.returncode == 5
    assert b"none.csv" in done.stderr
