"""A real Prometheus that scrapes a port of this machine, and what its API states.

Owns the child.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.dashboards import RULES, dashboard_queries, without_variables

PATIENCE_S = 60.0
_PAUSE_S = 0.25


def shown_queries() -> dict[str, str]:
    """The dashboard's, as Grafana sends them."""
    return {name: without_variables(query) for name, query in dashboard_queries().items()}


class Prometheus:
    """One that scrapes `target_port` once a second."""

    def __init__(self, home: Path, target_port: int) -> None:
        executable = shutil.which("prometheus")
        if executable is None:
            pytest.skip("Prometheus is not installed")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {
                    "job_name": "penstock",
                    "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}],
                }
            ],
        }
        # JSON is YAML.
        (home / "prometheus.yaml").write_text(json.dumps(config))
        self._log = (home / "log").open("wb")
        self._process = subprocess.Popen(
            [
                executable,
                f"--config.file={home / 'prometheus.yaml'}",
                f"--storage.tsdb.path={home / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--log.level=warn",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an API call; None while it does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
            answer = json.loads(connection.getresponse().read())
        except (ConnectionError, json.JSONDecodeError):
            return None
        finally:
            connection.close()
        assert answer.get("status") == "success", answer
        return answer["data"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        self._log.close()

    def has_data(self, query: str) -> bool:
        """Whether it comes to a number, in any of its series."""
        answer = self.ask("query", query=query)
        return answer is not None and any(
            series["value"][1] != "NaN" for series in answer["result"]
        )

    def until_data(
        self, queries: dict[str, str], go_on: Callable[[], None] = lambda: None
    ) -> dict[str, str]:
        """Those without data still, after asking for them until all have it or patience ends."""
        pause = threading.Event()
        missing = queries
        for _ in range(int(PATIENCE_S / _PAUSE_S)):
            go_on()
            # Prometheus has no way to state that it has scraped.
            pause.wait(_PAUSE_S)
            missing = {name: query for name, query in queries.items() if not self.has_data(query)}
            if not missing:
                break
        return missing

    def check_health(self) -> None:
        """AssertionError unless the target answers and every rule can be reported."""
        (target,) = self.ask("targets")["activeTargets"]
        assert target["health"] == "up", target["lastError"]
        rules = [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]
        assert rules
        assert [rule for rule in rules if rule["health"] not in ("ok", "unknown")] == []
