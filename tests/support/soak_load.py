"""The clients of a soak: steady streams, bursts, canaries, and processes to be struck.

Owns who asks for what and when. What a request goes through is in soak_call.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from support.soak_call import Lines, SoakCall
from support.soak_ledger import Kind, Ledger, Outcome
from support.soak_plan import SoakPlan
from support.soak_reference import NUM_CANARIES, Prompt, Reference, marked

TESTS = Path(__file__).resolve().parents[1]
POISON, DEADLY = 21, 22
"""Tokens of a prompt: its request fails alone, or the engine's process ends."""
CANARY_TOKENS = 32
_READY_S = 60.0


class Load:
    """Everything that asks. `run` returns when `seconds` are over and all of it has ended."""

    def __init__(self, plan: SoakPlan, lines: Lines, reference: Reference, ledger: Ledger) -> None:
        self.plan = plan
        self.lines = lines
        self.ledger = ledger
        self.holders: list[asyncio.subprocess.Process] = []
        self._reference = reference
        self._until_s = time.monotonic() + plan.seconds
        self._num_canaries = 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until_s

    async def run(self) -> None:
        """Steady streams, bursts and canaries, side by side."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.plan.num_streams):
                group.create_task(self._stream(random.Random(f"{self.plan.seed}/{number}")))
            group.create_task(self._bursts(random.Random(f"{self.plan.seed}/bursts")))
            group.create_task(self._canaries())

    async def canary(self) -> Outcome:
        """One that is known by heart."""
        number, self._num_canaries = self._num_canaries, self._num_canaries + 1
        prompt = self._reference.canary(number % NUM_CANARIES)
        return await self._call(Kind.CANARY, prompt, CANARY_TOKENS, number, is_resumable=True).run()

    async def deadly(self) -> Outcome:
        """One that ends the engine's process whenever it gets its fourth token."""
        prompt = marked(self._reference.canary(0), DEADLY)
        return await self._call(Kind.DEADLY, prompt, CANARY_TOKENS, 0, is_resumable=False).run()

    async def hold(self, address: str) -> asyncio.subprocess.Process:
        """A client process with streams that run; a caller that asks for it faults it."""
        paths = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "support.stream_holder", address, str(self.plan.num_held)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self.holders.append(process)
        assert process.stdout is not None
        with contextlib.suppress(TimeoutError):
            # It may be refused, or lose its engine: it is struck all the same.
            async with asyncio.timeout(_READY_S):
                await process.stdout.readline()
        return process

    def _call(
        self, kind: Kind, prompt: Prompt, num_tokens: int, seed: int, *, is_resumable: bool
    ) -> SoakCall:
        return SoakCall(
            kind=kind,
            prompt=prompt,
            reference=self._reference.tokens(prompt, num_tokens),
            is_resumable=is_resumable,
            lines=self.lines,
            ledger=self.ledger,
            chance=random.Random(f"{kind}/{seed}"),
        )

    async def _stream(self, chance: random.Random) -> None:
        while not self.is_over:
            kind = self._draw_kind(chance)
            prompt = self._reference.draw(chance)
            if kind is Kind.POISON:
                prompt = marked(prompt, POISON)
            num_tokens = chance.randint(self.plan.min_tokens, self.plan.max_tokens)
            is_resumable = chance.random() < self.plan.resumable_share and kind is not Kind.POISON
            seed = chance.getrandbits(32)
            call = self._call(kind, prompt, num_tokens, seed, is_resumable=is_resumable)
            if kind is Kind.CANCEL:
                call.leaves_after = chance.randint(0, num_tokens // 2)
            call.reads_slowly = kind is Kind.SLOW
            await call.run()

    def _draw_kind(self, chance: random.Random) -> Kind:
        plan = self.plan
        draw = chance.random()
        for kind, share in (
            (Kind.CANCEL, plan.cancel_share),
            (Kind.SLOW, plan.slow_share),
            (Kind.POISON, 0.0 if plan.is_torch else plan.poison_share),
        ):
            if draw < share:
                return kind
            draw -= share
        return Kind.STEADY

    async def _bursts(self, chance: random.Random) -> None:
        while True:
            await self._pause(self.plan.burst_every_s)
            if self.is_over:
                return
            calls = [
                self._call(
                    Kind.BURST,
                    self._reference.draw(chance),
                    self.plan.min_tokens,
                    chance.getrandbits(32),
                    is_resumable=True,
                )
                for _ in range(self.plan.burst_size)
            ]
            await asyncio.gather(*(call.run() for call in calls))

    async def _canaries(self) -> None:
        async with asyncio.TaskGroup() as group:
            while not self.is_over:
                group.create_task(self.canary())
                await self._pause(self.plan.canary_every_s)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, min(seconds, self._until_s - time.monotonic())))

    async def end_holders(self) -> None:
        """Kill the client processes that are left."""
        for process in self.holders:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await process.communicate()


@contextlib.asynccontextmanager
async def loaded(load: Load) -> AsyncGenerator[Load]:
    """The load, and none of its processes after the block."""
    try:
        yield load
    finally:
        await load.end_holders()
        await load.lines.close()
