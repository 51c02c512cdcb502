"""Case 48: the soak for less than a minute; soak.py runs it for five minutes or two hours."""

from __future__ import annotations

import pytest

from support.soak_plan import (
    SoakPlan,
)
from support.soak_run import as_text, run_soak


@pytest.mark.timeout(180)
async def test_case_48_soak(capsys: pytest.CaptureFixture[str]) -> None:
    plan = SoakPlan(seconds=40.0, strike_every_s=4.0, burst_every_s=10.0)
    lines: list[str] = []
    result = await run_soak(plan, lines.append)
    assert result.holds, "\n".join([*lines, as_text(result)])
