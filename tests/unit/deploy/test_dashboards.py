"""The queries of the dashboard and of the alert rules are valid, and their metrics exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from penstock.server.observe.metrics import labels
from penstock.server.observe.metrics.catalogue import CATALOGUE
from support.dashboards import (
    RULES,
    alert_queries,
    dashboard_queries,
    unknown_names,
    without_variables,
)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed")
    return subprocess.run(
        [found, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def test_every_metric_and_label_in_queries_exists() -> None:
    queries = dashboard_queries() | alert_queries()
    assert {name: found for name, query in queries.items() if (found := unknown_names(query))} == {}
    assert len(queries) > 80


def test_reasons_in_queries_exist() -> None:
    queries = dashboard_queries() | alert_queries()
    asked = {
        reason
        for query in queries.values()
        for reason in re.findall(r'reason=~?"([A-Z_|a-z]+)"', query)
        for reason in reason.split("|")
    }
    assert asked
    assert asked <= {*labels.REASONS, *labels.WAIT_REASONS}


def test_prometheus_understands_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    recorded = [
        {"record": f"query:{index}", "expr": without_variables(query)}
        for index, query in enumerate(dashboard_queries().values())
    ]
    rules.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))

    checked = promtool("check", "rules", rules)

    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", RULES),
        ("test", "rules", RULES.with_name("penstock_alerts_test.yaml")),
        ("check", "config", RULES.with_name("prometheus.yaml")),
    ],
)
def test_the_alert_rules_fire_when_they_should(arguments: tuple[str | Path, ...]) -> None:
    checked = promtool(*arguments)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_thresholds_of_alerts_are_bounds_of_buckets() -> None:
    ends = {spec.name: spec.buckets for spec in CATALOGUE}
    for query in alert_queries().values():
        for name, end in re.findall(r'(penstock_\w+)_bucket\{le="([^"]+)"', query):
            assert float(end) in ends[name], query
