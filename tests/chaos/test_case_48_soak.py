"""Case 48: runs the soak test for less than a minute; the program soak.py runs it longer."""

from __future__ import annotations

from chaos.soak import run_soak
from chaos.soak_load import SoakPlan


async def test_case_48_soak() -> None:
    plan = SoakPlan(seconds=40.0, fault_every_s=4.0, burst_every_s=10.0)
    lines: list[str] = []
    result = await run_soak(plan, lines.append)
    assert result.holds, "\n".join([*lines, str(result)])
