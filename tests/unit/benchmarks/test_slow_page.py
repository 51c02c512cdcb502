"""docs/why-is-it-slow.md: its pictures are there, its commands, options and queries exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from penstock.server.config import SETTINGS
from penstock.tools.command_line import build_parser
from support.dashboards import strangers

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "why-is-it-slow.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    fences = re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line for fence in fences for line in fence.splitlines() if "penstock " in line]
    found = [shlex.split(line, comments=True) for line in lines if not line.startswith(("20", "e"))]
    return [words[words.index("penstock") + 1 :] for words in found if "penstock" in words]


def test_every_command_parses() -> None:
    parser = build_parser()
    asked = commands()
    assert {words[0] for words in asked} == {"top", "serve", "timeline"}
    for words in asked:
        parser.parse_args(words)


def test_every_option_is_one() -> None:
    flags = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", PAGE))
    assert len(flags) > 10
    assert flags - {option.flag for option in SETTINGS} == set()


def test_every_query_and_metric_exists() -> None:
    queries = {text for text in re.findall(r"`([^`\n]+)`", PAGE) if "penstock_" in text}
    histograms = {
        "penstock_step_seconds",
        "penstock_step_tokens",
        "penstock_stream_stalled_seconds",
    }
    assert len(queries) > 10
    assert {query: strangers(query) for query in queries - histograms if strangers(query)} == {}
