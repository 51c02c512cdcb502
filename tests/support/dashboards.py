"""The Prometheus queries of the dashboard and the alert rules."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from penstock.server.observe.metrics.catalogue import CATALOGUE, MetricKind

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = DEPLOY / "dashboards" / "penstock.json"
RULES = DEPLOY / "prometheus" / "penstock_alerts.yaml"
_SELECTED = re.compile(r"\b(penstock_\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPED = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
_TARGET_LABELS = {"job", "instance", "model"}


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return loaded


def dashboard_queries() -> dict[str, str]:
    """Return every expression of the dashboard: expressions of panels by title, query id and panel
    id, expressions of annotations by name.
    """
    loaded = dashboard()
    queries = {
        f"{panel['title']} {target['refId']} ({panel['id']})": target["expr"]
        for panel in loaded["panels"]
        for target in panel.get("targets", ())
    }
    return queries | {note["name"]: note["expr"] for note in loaded["annotations"]["list"]}


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def alert_queries() -> dict[str, str]:
    """Return every expression of an alerting or recording rule, by the rule's name and index."""
    return {
        f"{rule.get('alert') or rule['record']} ({place})": rule["expr"]
        for place, rule in enumerate(rules())
    }


def without_variables(query: str) -> str:
    """Return the query as Grafana sends it with every variable set to all."""
    for name, value in {
        "$__rate_interval": "1m",
        "$model": ".*",
        "$instance": ".*",
    }.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query


def unknown_names(query: str) -> list[str]:
    """Return the metrics and labels in a query that the service does not export."""
    labels_of: dict[str, set[str]] = {}
    for spec in CATALOGUE:
        if spec.kind is MetricKind.HISTOGRAM:
            labels_of[f"{spec.name}_bucket"] = {*spec.labels, "le"}
            labels_of[f"{spec.name}_sum"] = labels_of[f"{spec.name}_count"] = set(spec.labels)
        else:
            labels_of[spec.name] = set(spec.labels)
    found: list[str] = []
    known = set(_TARGET_LABELS)
    for name, selector in _SELECTED.findall(query):
        if name not in labels_of:
            found.append(name)
            continue
        known |= labels_of[name]
        used = set(_LABEL.findall(re.sub(r'"[^"]*"', '""', selector)))
        found += [f"{name}{{{label}}}" for label in used - labels_of[name] - _TARGET_LABELS]
    for group in _GROUPED.findall(query):
        found += [label for label in group.replace(" ", "").split(",") if label not in known]
    return found
