"""`benchmarks/policies.py` as a process, on a trace of a moment: every part, every file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.tools.simulation.synthetic import SyntheticConfig, synthetic_trace
from penstock.tools.simulation.trace_files import TraceWriter

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "policies.py"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    config = SyntheticConfig(rate_per_s=10.0, duration_s=4.0, seed=5)
    with TraceWriter(path) as writer:
        for request in synthetic_trace(config):
            writer.write(request)
    return path


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def test_everything_is_told_in_one_run(trace: Path, tmp_path: Path) -> None:
    result, folder = tmp_path / "result.json", tmp_path / "report"

    done = compare(
        *("--trace", trace, "--jobs", 1, "--json", result, "--report", folder),
        *("--max-num-seqs", 4, "--batch-size", 4, "--max-tokens", 512),
    )

    assert done.returncode == 0, done.stderr
    document = json.loads(result.read_text(encoding="utf-8"))
    results = document["results"]
    assert {row["policy"] for row in results["policies"]} == {
        *("static", "dynamic", "fcfs", "fair", "penstock")
    }
    num_requests = sum(1 for line in trace.read_text(encoding="utf-8").splitlines() if line)
    assert {row["num_requests"] for row in results["policies"]} == {num_requests}
    # Two kinds of deadlines and two policies at four loads.
    assert len(results["deadlines"]) == 16
    assert len(results["neighbour"]) == 3
    assert [row["policy"] for row in results["served_shares"]] == ["fcfs", "fair", "penstock"]
    names = [check["name"] for check in document["checks"]]
    assert names[0] == "good of penstock over fcfs, load 1.2"
    # Without prefix ids there is no cache to compare.
    assert "prefix_reuse" not in results
    text = (folder / "policies.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 10
    assert text.count("<table>") == 7
    # Nothing but itself is needed to read it.
    assert "href" not in text
    assert "src=" not in text


def test_a_bad_price_is_named(trace: Path) -> None:
    done = compare("--trace", trace, "--cost", '{"step": 1}')

    assert done.returncode == 1
    assert "error: --cost" in done.stderr
    assert "Traceback" not in done.stderr
