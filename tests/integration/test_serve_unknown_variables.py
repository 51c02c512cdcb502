from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.timeout import TEST_TIMEOUT_S


@pytest.mark.parametrize(
    ("option", "value"),
    # The first is rejected when settings are merged, the second when the configuration is built.
    [("--port", "99999"), ("--max-num-batched-tokens", "1")],
)
def test_an_unknown_variable_is_reported_before_an_invalid_setting(option: str, value: str) -> None:
    inherited = {key: value for key, value in os.environ.items() if key[:9] != "PENSTOCK_"}
    done = subprocess.run(
        [sys.executable, "-m", "penstock.tools", "serve", option, value],
        env={**inherited, "PENSTOCK_MAX_NUM_SEQ": "4"},
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_TIMEOUT_S,
    )
    warning, error = [line for line in done.stderr.splitlines() if "is starting" not in line]
    assert "PENSTOCK_MAX_NUM_SEQ is set but is not a known setting" in warning
    assert "did you mean PENSTOCK_MAX_NUM_SEQS?" in warning
    assert error.startswith(f"penstock serve: {option} must be")
    assert done.returncode == 2
