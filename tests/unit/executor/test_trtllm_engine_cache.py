from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.executor.trtllm.engine_cache import MANIFEST, EngineCache, inventory
from support.trtllm_folders import engine_folder


def test_an_intact_engine_has_no_damage(tmp_path: Path) -> None:
    place = engine_folder(tmp_path / "engine")
    manifest = json.dumps({"engine": inventory(place)})
    (place / MANIFEST).write_text(manifest, encoding="utf-8")

    assert EngineCache(tmp_path).damage(place) == ""


@pytest.mark.parametrize(
    "manifest",
    [[], 7, {}, {"engine": None}, {"engine": ["config.json"]}, {"engine": {"config.json": 7}}],
    ids=json.dumps,
)
def test_a_malformed_manifest_is_damage(manifest: Any, tmp_path: Path) -> None:
    place = engine_folder(tmp_path / "engine")
    (place / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")

    assert EngineCache(tmp_path).damage(place).startswith(f"{MANIFEST} cannot be used: ")
