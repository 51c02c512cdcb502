"""The Prometheus adapter's rules compute the autoscaler's metrics from metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.dashboards import unknown_names
from support.kubernetes import FOLDER, build_with, named_manifest

RULES_FILE = FOLDER / "components" / "autoscaling" / "prometheus-adapter.yaml"
RULES: list[dict[str, Any]] = yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["rules"]
SERIES = 'namespace="penstock",pod="{}",model="demo"'


def filled(query: str) -> str:
    """Return the query as the adapter sends it for two pods of a namespace."""
    return query.replace("<<.LabelMatchers>>", 'namespace="penstock",pod=~"a|b"').replace(
        "<<.GroupBy>>", "pod"
    )


def test_the_adapter_provides_the_metrics_of_the_autoscaler() -> None:
    spec = named_manifest(build_with("autoscaling"), "HorizontalPodAutoscaler")["spec"]
    asked = {metric["pods"]["metric"]["name"] for metric in spec["metrics"]}
    assert asked == {rule["name"]["as"] for rule in RULES}
    for rule in RULES:
        assert set(rule) == {"seriesQuery", "resources", "name", "metricsQuery"}
        assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
        assert "<<.LabelMatchers>>" in rule["metricsQuery"]
        assert "<<.GroupBy>>" in rule["metricsQuery"]


def test_the_rules_query_metrics_of_penstock() -> None:
    for rule in RULES:
        series = re.match(r"penstock_\w+", rule["seriesQuery"])
        assert series is not None
        # Without its labels, which Prometheus puts there.
        assert unknown_names(series[0]) == []
        assert (
            unknown_names(
                re.sub(r"\{[^}]*\}", "", rule["metricsQuery"]).replace("<<.GroupBy>>", "job")
            )
            == []
        )


def test_the_rules_compute_the_expected_metrics(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    recorded = [
        {"record": rule["name"]["as"], "expr": filled(rule["metricsQuery"])} for rule in RULES
    ]
    (tmp_path / "rules.yaml").write_text(
        json.dumps({"groups": [{"name": "adapter", "rules": recorded}]})
    )
    a, b = SERIES.format("a"), SERIES.format("b")
    series = {
        f"penstock_num_requests_running{{{a}}}": "48x10",
        f"penstock_num_requests_waiting{{{a}}}": "16x10",
        f"penstock_max_requests_running{{{a}}}": "64x10",
        # Its engine is away: gauges are zero.
        f"penstock_num_requests_running{{{b}}}": "0x10",
        f"penstock_num_requests_waiting{{{b}}}": "0x10",
        f"penstock_max_requests_running{{{b}}}": "0x10",
        # Two requests a second, which had waited 1.5 s each; none at `b`.
        f"penstock_request_queue_seconds_sum{{{a}}}": "0+45x10",
        f"penstock_request_queue_seconds_count{{{a}}}": "0+30x10",
        f"penstock_request_queue_seconds_sum{{{b}}}": "0x10",
        f"penstock_request_queue_seconds_count{{{b}}}": "0x10",
    }
    wanted = {
        "penstock_load_ratio": {"a": 1.0, "b": 0.0},
        "penstock_queue_seconds": {"a": 1.5, "b": 0.0},
    }
    tests = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [
                    {"series": name, "values": values} for name, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": name,
                        "eval_time": "2m30s",
                        "exp_samples": [
                            {"labels": f'{name}{{pod="{pod}"}}', "value": value}
                            for pod, value in pods.items()
                        ],
                    }
                    for name, pods in wanted.items()
                ],
            }
        ],
    }
    (tmp_path / "tests.yaml").write_text(json.dumps(tests))
    done = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "tests.yaml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
