"""Case 48: the soak, for less than a minute; soak.py plays it for five, or for two hours."""

from __future__ import annotations

import random

import pytest

from penstock.v1 import generation_service_pb2 as pb
from support.soak_call import Lines, SoakCall
from support.soak_ledger import Kind, Ledger
from support.soak_plan import (
    DEATH_WINDOW_S,
    DEATHS,
    MAX_DEATHS,
    TRIAL_S,
    SoakPlan,
    Strike,
    schedule,
)
from support.soak_report import as_text
from support.soak_run import run_soak


@pytest.mark.timeout(180)
async def test_case_48_soak(capsys: pytest.CaptureFixture[str]) -> None:
    plan = SoakPlan(seconds=40.0, strike_every_s=4.0, burst_every_s=10.0)
    lines: list[str] = []
    result = await run_soak(plan, lines.append)
    assert result.holds, "\n".join([*lines, as_text(result)])


@pytest.mark.parametrize("seed", range(5))
def test_case_48_schedule_of_strikes(seed: int) -> None:
    """Everything is struck, and the engine never more often than a service must bear."""
    plan = SoakPlan(seconds=600.0, seed=seed, strike_every_s=7.0)
    told = schedule(plan)
    assert told == schedule(plan)
    assert {strike for _, strike in told} == set(Strike)
    for at_s, _ in told:
        deaths = [
            DEATHS.get(strike, 0)
            for time_s, strike in told
            if at_s - DEATH_WINDOW_S < time_s <= at_s
        ]
        assert sum(deaths) <= MAX_DEATHS
    own = (Strike.DEADLY_PROMPT, Strike.ENGINE_HANG)
    tried_s = [time_s for time_s, strike in told if strike in own]
    for at_s, strike in told:
        if strike in DEATHS:
            assert not any(0.0 < at_s - time_s < TRIAL_S for time_s in tried_s)


def tokens(sequence: int, *ids: int) -> pb.GenerateResponse:
    message = pb.GenerateResponse(sequence=sequence)
    message.tokens.num_tokens = len(ids)
    for token_id in ids:
        message.tokens.records.add(id=token_id)
    return message


@pytest.mark.parametrize(
    ("messages", "wrong"),
    [
        ([tokens(0, 1, 2), tokens(1, 3)], ""),
        ([tokens(0, 1), tokens(1, 3)], "other tokens from 1 on"),
        ([tokens(0, 1), tokens(1, 1)], "other tokens from 1 on"),
        ([tokens(0, 1), tokens(2, 2)], "message 2 in place of 1"),
        ([tokens(0, 1, 2, 3), tokens(1, 4)], "other tokens from 3 on"),
    ],
    ids=["right", "missing", "twice", "lost", "too many"],
)
async def test_case_48_what_is_wrong_is_seen(
    messages: list[pb.GenerateResponse], wrong: str
) -> None:
    lines, ledger = Lines("127.0.0.1:1", 1), Ledger()
    call = SoakCall(
        kind=Kind.STEADY,
        prompt=(5,),
        reference=[1, 2, 3],
        is_resumable=True,
        lines=lines,
        ledger=ledger,
        chance=random.Random(1),
    )
    for message in messages:
        call.take(message)
    assert (wrong in "".join(ledger.wrong)) if wrong else not ledger.wrong
    await lines.close()
