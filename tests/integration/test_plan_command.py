"""Runs `penstock plan` and `penstock simulate --replicas`; checks output, files and exit codes."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from support.cli_process import Result, called

COST = json.dumps(
    {"step_s": 1.0, "prefill_token_s": 0.0, "decode_slot_s": 0.0, "context_token_s": 0.0}
)
# One request at a time, a second for each of its three tokens.
SERVER = ("--cost", COST, "--max-num-seqs", 1, "--num-blocks", 64)
TARGET = ("--target-ttft-p99-s", 1.5, "--target-itl-p99-ms", 1500)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace of one request per second for a minute. It requires three of the simulated
    servers.
    """
    path = tmp_path / "trace.jsonl"
    lines = (
        json.dumps({"arrival_s": i, "prompt_tokens": 8, "output_tokens": 3}) for i in range(60)
    )
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


Command = Callable[..., Result]


@pytest.fixture
def penstock(capsys: pytest.CaptureFixture[str]) -> Command:
    return partial(called, capsys)


def test_the_known_answer_is_found_and_reported(
    penstock: Command, trace: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report"

    done = penstock("plan", "--trace", trace, *TARGET, *SERVER, "--report", report)

    assert done.code == 0, done.err
    assert "needed       3 x default behind round_robin; add one" in done.out
    assert "default, 2 replicas: p99 TTFT" in done.err
    assert sorted(path.name for path in report.iterdir()) == ["plan.html", "plan.json"]
    document = json.loads((report / "plan.json").read_text(encoding="utf-8"))
    assert document["candidates"][0]["num_replicas"] == 3


def test_the_cheapest_of_a_file_of_candidates(
    penstock: Command, trace: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "candidates.json"
    fast = {"name": "fast", "price": 2, "cost": {"step_s": 0.6}, "router": "least_loaded"}
    settings.write_text(json.dumps([{"name": "slow", "price": 1.5}, fast]), encoding="utf-8")

    done = penstock(
        *("plan", "--trace", trace, *TARGET, *SERVER, "--settings", settings),
        *("--json", "--no-progress", "--curve-requests", 0, "--window-s", 30),
    )

    assert done.code == 0, done.err
    assert done.err == ""
    document = json.loads(done.out)
    assert document["best"] == "fast"
    assert [found["total_price"] for found in document["candidates"]] == [4.5, 4.0]
    assert document["window"]["num_requests"] == 30


def test_no_candidate_within_the_limit_exits_with_code_1_and_a_report(
    penstock: Command, trace: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report"

    done = penstock(
        *("plan", "--trace", trace, *TARGET, *SERVER, "--max-replicas", 2, "--report", report),
        *("--curve-requests", 0),
    )

    assert done.code == 1
    assert "no candidate meets the target with up to 2 replicas" in done.out
    assert (report / "plan.html").exists()


@pytest.mark.parametrize("router", ["round_robin", "least_loaded", "prefix_aware"])
def test_replicas_are_simulated_and_reported(
    penstock: Command, trace: Path, tmp_path: Path, router: str
) -> None:
    report = tmp_path / "report"

    done = penstock(
        *("simulate", "--trace", trace, *SERVER, "--replicas", 3, "--router", router),
        *("--report", report),
    )

    assert done.code == 0, done.err
    assert f"routing      {router}, 3 replicas, 1.00" in done.out
    document = json.loads((report / "summary.json").read_text(encoding="utf-8"))
    assert [replica["num_requests"] for replica in document["replicas"]] == [20, 20, 20]
    assert document["figures"]["num_requests"] == 60
    assert document["figures"]["ttft"]["max_s"] == 1.0
