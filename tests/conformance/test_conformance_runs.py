"""A run reports the failure of a misbehaving program, and continues with the next scenario."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import pytest

from conformance.harness import Harness
from conformance.runs import Result, Run

# Real processes, a fake service.
PRELUDE = """
import json, sys
def write_line(**line):
    print(json.dumps(line), flush=True)
def passed(name):
    write_line(scenario=name, outcome="passed")
"""


class FakeHarness(Harness):
    """Stands in for the service, and records the calls that it receives."""

    def __init__(self, busy: Sequence[str] = (), lacking: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.acts: list[str] = []
        self._num_starts = 0
        self._is_up = False
        self._busy = list(busy)
        self._lacking = lacking or {}

    async def address(self) -> str:
        self._num_starts += not self._is_up
        self._is_up = True
        return f"127.0.0.1:{self._num_starts}"

    async def close(self) -> None:
        self._is_up = False

    async def kill_engine(self) -> None:
        self.acts.append("kill")

    async def drain(self) -> None:
        self.acts.append("drain")

    async def begin(self, scenario: str) -> None:
        self.acts.append(scenario)

    async def lacks(self) -> str:
        return self._lacking.get(self.acts[-1], "")

    async def why_not_idle(self) -> str:
        return self._busy.pop(0) if self._busy else ""


def program(body: str) -> list[str]:
    """Return the command of a program that runs `body` for each line of stdin."""
    indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return [
        sys.executable,
        "-c",
        f"{PRELUDE}\nfor line in sys.stdin:\n    line = line.strip()\n{indented}",
    ]


async def results(body: str, *names: str, harness: Harness | None = None) -> list[Result]:
    async with Run(program(body), harness=harness or FakeHarness(), answer_s=10.0) as run:
        return [await run.ask(name) for name in names]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("print('hello', flush=True)", "Expecting value"),
        ("print('[]', flush=True)", "no JSON object"),
        ("passed('deadline')", "another scenario"),
        ("write_line(scenario=line, outcome='perhaps')", "neither an event nor an outcome"),
        ("sys.exit('sick')", "ended with code 1; stderr: sick"),
        ("for _ in range(50): write_line(scenario=line, event='ready')", "without an outcome"),
        ("print('x' * (2 << 20), flush=True)", "limit"),
    ],
)
async def test_a_protocol_violation_fails_only_its_scenario(bad: str, why: str) -> None:
    body = f"if line == 'chat':\n    {bad}\nelse:\n    passed(line)"

    first, second = await results(body, "chat", "resume")

    assert first.outcome == "failed"
    assert why in first.why
    assert second == Result(scenario="resume", outcome="passed")


async def test_a_program_that_does_not_answer_is_killed() -> None:
    async with Run(program("pass"), harness=FakeHarness(), answer_s=0.1) as run:
        result = await run.ask("chat")

    assert result == Result(scenario="chat", outcome="failed", why="no answer within 0.1 s")


async def test_the_driver_acts_when_the_program_is_ready() -> None:
    body = """
if line == "drain":
    write_line(scenario=line, event="ready")
    word = sys.stdin.readline().strip()
    write_line(scenario=line, outcome="failed", why=word)
elif line == "engine_killed":
    write_line(scenario=line, event="ready")
    passed(line)
"""
    harness = FakeHarness()

    killed, drained = await results(body, "engine_killed", "drain", harness=harness)

    assert killed.outcome == "passed"
    assert drained.why == "go"
    assert harness.acts == ["engine_killed", "kill", "drain", "drain"]


async def test_a_request_left_running_fails_the_scenario_and_the_next_gets_a_new_service() -> None:
    body = """
if line.startswith("address "):
    address = line
elif line == "resume":
    write_line(scenario=line, outcome="failed", why=address)
else:
    passed(line)
"""
    harness = FakeHarness(busy=["3 requests live"])

    chat, resume = await results(body, "chat", "resume", harness=harness)

    assert chat.outcome == "failed"
    assert chat.why == "3 requests live"
    assert resume.why == "address 127.0.0.1:2"


@pytest.mark.parametrize("name", ["engine_killed", "drain"])
async def test_a_scenario_that_passes_without_its_ready_event_fails(name: str) -> None:
    (result,) = await results("passed(line)", name)

    assert result.outcome == "failed"
    assert "without having said ready" in result.why
