"""A sample of the architecture sweep, and the page that the whole sweep writes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import transformers

from support import architecture_sweep
from support.architecture_check import Verdict, check_architecture
from support.architecture_sweep import (
    PAGE,
    known_types,
    page_of,
    work,
    worker_environment,
    write_page,
)

EXACT = ("llama", "gpt_oss", "gemma2", "qwen2", "gpt2", "opt")
REFUSED = {
    "bart": "position_ids",
    "roberta": "positions from 0",
    "falcon": "attention interface",
    "bloom": "max_position_embeddings",
    "mamba": "linear_attention",
    "qwen2_moe": "hide their window",
    "diffllama": "more than once",
}


@pytest.mark.parametrize("model_type", EXACT)
def test_the_engine_computes_what_the_model_computes_alone(model_type: str) -> None:
    verdict = check_architecture(model_type)

    assert (verdict.outcome, verdict.detail) == ("exact", "")
    assert verdict.largest_error < 1e-3


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_refusal_names_the_type_and_the_reason(model_type: str) -> None:
    verdict = check_architecture(model_type)

    assert verdict.outcome == "refused"
    assert model_type in verdict.detail
    assert REFUSED[model_type] in verdict.detail


def test_a_hidden_window_bounds_the_length() -> None:
    verdict = check_architecture("phimoe")

    assert verdict.outcome == "exact"
    assert "32" in verdict.detail


def test_a_type_that_cannot_be_built_is_a_result() -> None:
    assert check_architecture("musicgen").outcome == "not buildable"


def test_a_worker_reports_a_line_for_each_type(capsys: pytest.CaptureFixture[str]) -> None:
    work(["bloom", "no-such-type"], "cpu")

    verdicts = [Verdict(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    assert [verdict.outcome for verdict in verdicts] == ["refused", "not buildable"]
    page = page_of(verdicts, "cpu")
    assert "`bloom`" in page
    assert "`no-such-type`" in page


def test_the_page_has_every_type_and_none_is_wrong() -> None:
    page = PAGE.read_text(encoding="utf-8")
    version = re.search(r"version (\S+),", page)
    assert version is not None
    if version[1] != transformers.__version__:
        pytest.skip(f"the page is of transformers {version[1]}")

    assert set(known_types()) <= set(re.findall(r"`([\w-]+)`", page))
    assert "| wrong | 0 |" in page


def test_a_worker_finds_what_its_parent_finds() -> None:
    found = worker_environment({"PYTHONPATH": "/a:/b"})["PYTHONPATH"]

    assert found.split(os.pathsep)[1:] == ["/a", "/b"]


def test_each_device_writes_its_part_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("old\n")
    monkeypatch.setattr(architecture_sweep, "PAGE", page)
    fused = Verdict(model_type="first", outcome="exact", is_fused=True)
    write_page([fused], "cuda")
    on_cuda = page.read_text()

    write_page([Verdict(model_type="second", outcome="exact")], "cpu")

    assert on_cuda.startswith("old\n")
    section = on_cuda.removeprefix("old\n")
    assert "By the fused step: `first`." in section
    assert page.read_text().endswith(section)
    assert "`second`" in page.read_text()
    write_page([fused], "cuda")
    assert page.read_text().count("## On CUDA") == 1
