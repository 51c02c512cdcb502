"""The arrows between components point one way; pyproject.toml states which."""

from __future__ import annotations

import pathlib
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def test_import_contracts_are_kept() -> None:
    lint_imports = pathlib.Path(sys.executable).with_name("lint-imports")

    result = subprocess.run(
        [lint_imports, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout + result.stderr
