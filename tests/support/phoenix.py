"""A real Arize Phoenix on free ports of this machine, and what its API says of traces.

Owns the child. It is found by PENSTOCK_PHOENIX, the path of its `phoenix` command: it is too large
to be installed with the tests.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import threading
import urllib.parse
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "PENSTOCK_PHOENIX"
PATIENCE_S = 120.0
_MAX_PAGES = 100
_MAX_LINES = 100_000


@dataclass(frozen=True)
class Trace:
    """Spans as Phoenix gives them out, children in the order of their beginning."""

    root: dict[str, Any]
    children: tuple[dict[str, Any], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(span["name"] for span in self.children)


def attribute(span: Mapping[str, Any], key: str) -> Any:
    """An attribute: Phoenix may nest what has dots in its name."""
    found: Any = span["attributes"]
    if key in found:
        return found[key]
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return found


class Phoenix:
    """One that runs. `otlp`: where to send spans, over gRPC."""

    def __init__(self, port: int, otlp_port: int) -> None:
        self._port = port
        self.url = f"http://127.0.0.1:{port}"
        self.otlp = f"http://127.0.0.1:{otlp_port}"

    def ask(self, path: str, **parameters: Any) -> Any:
        """The answer of its API; None for a project that it has not seen yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            connection.request("GET", f"/v1/{path}?{urllib.parse.urlencode(parameters)}")
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status == http.client.NOT_FOUND:
            return None
        assert answer.status == http.client.OK, body
        return json.loads(body)

    def spans(self, project: str) -> list[dict[str, Any]]:
        """Every span of a project."""
        found: list[dict[str, Any]] = []
        parameters: dict[str, Any] = {"limit": 1000}
        for _ in range(_MAX_PAGES):
            page = self.ask(f"projects/{project}/spans", **parameters)
            if page is None:
                return found
            found += page["data"]
            if not page["next_cursor"]:
                return found
            parameters["cursor"] = page["next_cursor"]
        raise AssertionError("its pages do not end")


def traces_of(spans: Sequence[dict[str, Any]]) -> dict[str, Trace]:
    """By trace id. AssertionError unless each is one root, and children of it alone."""
    by_trace: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        by_trace[span["context"]["trace_id"]].append(span)
    traces: dict[str, Trace] = {}
    for trace_id, members in by_trace.items():
        roots = [span for span in members if span["parent_id"] is None]
        assert len(roots) == 1, [(span["name"], span["parent_id"]) for span in members]
        children = [span for span in members if span not in roots]
        assert {span["parent_id"] for span in children} <= {roots[0]["context"]["span_id"]}
        children.sort(key=lambda span: (span["start_time"], span["end_time"]))
        traces[trace_id] = Trace(roots[0], tuple(children))
    return traces


@contextlib.contextmanager
def phoenix(command: Path, home: Path) -> Generator[Phoenix]:
    """Run one whose files are in `home`, telling nobody outside."""
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        port, otlp_port = first.getsockname()[1], second.getsockname()[1]
    inherited = {
        key: text for key, text in os.environ.items() if not key.startswith(("OTEL_", "PHOENIX_"))
    }
    # Its packages are its own.
    inherited.pop("PYTHONPATH", None)
    settings = {
        "PHOENIX_WORKING_DIR": str(home),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(otlp_port),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        "PYTHONUNBUFFERED": "1",
    }
    log = home / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [command, "serve"],
            env={**inherited, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        # It must never wait for somebody to read what it says.
        rest = threading.Thread(target=shutil.copyfileobj, args=(process.stdout, sink))
        try:
            for num, line in enumerate(process.stdout):
                sink.write(line)
                assert num < _MAX_LINES, "its log does not end"
                if b"Uvicorn running" in line:
                    break
            else:
                sink.flush()
                raise AssertionError(log.read_text(errors="replace"))
            rest.start()
            yield Phoenix(port, otlp_port)
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
            if rest.ident is not None:
                rest.join(PATIENCE_S)
            process.stdout.close()
