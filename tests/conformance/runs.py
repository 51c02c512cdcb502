"""Runs scenarios on a conformance program and a service, and returns their results.

Contains the program's process and the line protocol between driver and program, but nothing
specific to a language. Every wait has a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

from conformance.harness import Harness
from conformance.scenarios import BY_NAME, DriverAction, Scenario

Outcome = Literal["passed", "failed", "skipped"]
_OUTCOMES = ("passed", "failed", "skipped")

ANSWER_S = 90.0
"""Limit of one scenario; programs limit each to 60 s themselves."""
_EXIT_S = 30.0
_MAX_LINE_BYTES = 1 << 20
_MAX_LINES = 20
_NUM_KEPT_LINES = 12
_MAX_WHY_CHARS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one scenario; `why` is "" when it passed."""

    scenario: str
    outcome: Outcome
    why: str = ""


class Program:
    """A program's process: receives lines on stdin, and prints JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._stderr_lines: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, command: Sequence[str], address: str) -> Program:
        """Start `command` in a new process group, so that all its processes can be killed."""
        process = await asyncio.create_subprocess_exec(
            *command,
            "--address",
            address,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,
        )
        return cls(process)

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def write_line(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `read` reports its end
            self._process.stdin.write(f"{line}\n".encode())
            await self._process.stdin.drain()

    async def read(self) -> dict[str, Any]:
        """Return the program's next line, decoded. Raises ValueError if it is no JSON object,
        EOFError after the program's exit.
        """
        assert self._process.stdout is not None
        raw = await self._process.stdout.readline()
        if not raw:
            code = await self._process.wait()
            await self._listener
            raise EOFError(f"the program ended with code {code}{self.stderr_suffix}")
        line: object = json.loads(raw)
        if not isinstance(line, dict):
            raise ValueError(f"no JSON object: {raw[:100]!r}")
        return cast("dict[str, Any]", line)

    @property
    def stderr_suffix(self) -> str:
        return "; stderr: " + " | ".join(self._stderr_lines) if self._stderr_lines else ""

    async def exit_code(self) -> int | None:
        """Close the program's stdin; return its exit code, None if it does not exit in time."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_EXIT_S):
                return await self._process.wait()
        except TimeoutError:
            return None

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._listener

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while raw := await self._process.stderr.read(4096):
            self._stderr_lines.extend(raw.decode(errors="replace").splitlines())


class Run:
    """Runs scenarios one after another on one program: `async with Run(command) as run`."""

    def __init__(
        self, command: Sequence[str], *, harness: Harness | None = None, answer_s: float = ANSWER_S
    ) -> None:
        self._command = command
        self._harness = harness or Harness()
        self._answer_s = answer_s
        self._program: Program | None = None
        self._sent_address = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end_program()
        await self._harness.close()

    async def ask(self, name: str) -> Result:
        """Run one scenario and return its result. An error of the program is a failed result."""
        scenario = BY_NAME[name]
        try:
            program = await self._ready_program()
            await self._harness.begin(scenario.name)
        except (FileNotFoundError, PermissionError) as error:
            return Result(scenario=name, outcome="failed", why=f"does not start: {error}")
        try:
            async with asyncio.timeout(self._answer_s):
                result = await self._run_scenario(program, scenario)
        except TimeoutError:
            why = f"no answer within {self._answer_s:g} s{program.stderr_suffix}"
            result = Result(scenario=name, outcome="failed", why=why)
            await self._end_program()
        except (EOFError, ValueError) as error:
            result = Result(scenario=name, outcome="failed", why=_short(str(error)))
            await self._end_program()
        return await self._cleaned(scenario, result)

    async def end_and_check(self) -> str:
        """Close the program's stdin; return a description of an incorrect exit, "" if there is
        none.
        """
        if self._program is None or not self._program.is_running:
            return ""
        code = await self._program.exit_code()
        if code == 0:
            return ""
        how = f"exited with {code}" if code is not None else f"did not exit within {_EXIT_S:.0f} s"
        return f"at the end of its stdin the program {how}{self._program.stderr_suffix}"

    async def _ready_program(self) -> Program:
        address = await self._harness.address()
        if self._program is None or not self._program.is_running:
            await self._end_program()
            self._program = await Program.start(self._command, address)
        elif address != self._sent_address:
            await self._program.write_line(f"address {address}")
        self._sent_address = address
        return self._program

    async def _run_scenario(self, program: Program, scenario: Scenario) -> Result:
        await program.write_line(scenario.name)
        has_acted = scenario.act is DriverAction.NOTHING
        for _ in range(_MAX_LINES):
            line = await program.read()
            if line.get("scenario") != scenario.name:
                raise ValueError(f"a line of another scenario: {line}")
            if line.get("event") == "ready":
                await self._act(program, scenario.act)
                has_acted = True
            elif line.get("outcome") in _OUTCOMES:
                why = _short(str(line.get("why", "")))
                if line["outcome"] == "passed" and not has_acted:
                    raise ValueError(f"it passed without having said ready: {scenario.act.value}")
                return Result(scenario=scenario.name, outcome=line["outcome"], why=why)
            else:
                raise ValueError(f"neither an event nor an outcome: {line}")
        raise ValueError(f"{_MAX_LINES} lines without an outcome")

    async def _act(self, program: Program, act: DriverAction) -> None:
        if act is DriverAction.KILL_ENGINE:
            await self._harness.kill_engine()
        elif act is DriverAction.DRAIN:
            await self._harness.drain()
            await program.write_line("go")

    async def _cleaned(self, scenario: Scenario, result: Result) -> Result:
        """Return `result`, or a failed result if the scenario left requests running, or passed
        without leaving the expected evidence at the service. Stops the service after a drain or a
        failure.
        """
        why = await self._harness.lacks() if result.outcome == "passed" else ""
        if scenario.act is DriverAction.DRAIN or why or result.outcome == "failed":
            await self._harness.close()
        else:
            why = await self._harness.why_not_idle()
            if why:
                await self._harness.close()
        if not why:
            return result
        return Result(scenario=scenario.name, outcome="failed", why=_short(why))

    async def _end_program(self) -> None:
        if self._program is not None:
            await self._program.end()
            self._program = None


async def results_of(
    command: Sequence[str],
    names: Sequence[str],
    on_result: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Run the scenarios `names` on the program `command`, to which `--address` is appended.

    Return one result for each, in order, and one named "exit" if the program does not exit
    correctly.
    """
    results: list[Result] = []

    def add(result: Result) -> None:
        results.append(result)
        on_result(result)

    async with Run(command) as run:
        for name in names:
            add(await run.ask(name))
        why = await run.end_and_check()
        if why:
            add(Result(scenario="exit", outcome="failed", why=_short(why)))
    return results


def _short(text: str) -> str:
    return text if len(text) <= _MAX_WHY_CHARS else f"{text[:_MAX_WHY_CHARS]}..."
