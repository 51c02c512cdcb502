"""docs/why-is-it-slow.md: its pictures are there, its commands, options and queries exist."""

from __future__ import annotations

import importlib
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml

from penstock.server.config import SETTINGS
from penstock.tools.command_line import build_parser
from support.dashboards import RULES, strangers

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "why-is-it-slow.md").read_text(encoding="utf-8")
PICTURES = re.findall(r"!\[([^\]]+)\]\((pictures/[^)]+)\)", PAGE)
MAX_BYTES = 150_000
CASES = ("blocks", "flood", "prompt", "reader", "killed")


def test_every_picture_of_the_folder_is_on_the_page_with_words_for_it() -> None:
    there = {
        f"pictures/{path.name}"
        for path in (DOCS / "pictures").iterdir()
        if path.name.startswith(CASES)
    }
    assert {path for _, path in PICTURES} == there
    assert len(there) >= 9
    assert all(len(told.split()) > 2 for told, _ in PICTURES)


@pytest.mark.parametrize("path", [path for _, path in PICTURES])
def test_a_picture_is_whole_small_and_needs_nothing_from_elsewhere(path: str) -> None:
    data = (DOCS / path).read_bytes()
    assert len(data) < MAX_BYTES
    assert ET.fromstring(data).tag == "{http://www.w3.org/2000/svg}svg"
    links = set(re.findall(rb"https?://[^\"' )]+", data)) - {b"http://www.w3.org/2000/svg"}
    assert links == set()
    assert b"<script" not in data


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


def test_every_alert_exists() -> None:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    named = set(re.findall(r"`(Penstock[A-Z]\w+)`", PAGE))
    assert len(named) > 3
    assert named <= alerts


def test_links_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", each.lower()).replace(" ", "-") for each in headings}
    for target in re.findall(r"(?<!!)\[[^\]]+\]\(([^)]+)\)", PAGE):
        file, _, anchor = target.partition("#")
        assert (DOCS / file).exists() if file else anchor in anchors, target


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_its_figures_and_tells_its_own_queries(name: str) -> None:
    page = importlib.import_module("slow_site")
    (case,) = (each for each in importlib.import_module("slow_cases").cases() if each.name == name)
    assert page.with_told(PAGE, name, "") != PAGE
    told = PAGE.partition(page.MARK.format(name))[2].partition(page.MARK_END)[0]
    assert "| source | figure |" in told
    assert "\nsteps " in told
    assert [query for query in case.queries if f"`{query}`" not in told] == []


def test_the_cases_are_those_of_the_page() -> None:
    assert tuple(each.name for each in importlib.import_module("slow_cases").cases()) == CASES
