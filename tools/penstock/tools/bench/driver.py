"""Sends each request of a run when it is due (in a closed loop: when another has ended) and records
it.

Executes one process's part of a run, which ends at the latest at the plan's `end_s + drain_s`. The
requests, the function that sends them and the clock are passed in.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

from penstock.client.errors import PenstockError
from penstock.client.events import Event, Finished, Tokens
from penstock.tools.bench.plan import LoadPlan
from penstock.tools.bench.recorder import LoadRecorder, OpenRequest
from penstock.tools.bench.schedule import PlannedRequest, RandomPromptMaker, part_of

ERROR_PAUSE_S = 0.05
"""Pause of a closed loop after a request that did not complete, seconds; avoids a busy loop if the
server is unreachable.
"""

_RESOLUTION_S = 1e-6
"""Resolution of the histograms, in seconds; shorter waits are skipped."""


Generate: TypeAlias = Callable[[PlannedRequest, list[int]], AsyncGenerator[Event, None]]
"""Sends a request and returns its events; closing the generator cancels the request.

Iteration raises PenstockError.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One process's part of the plan's limits. `max_requests`: the maximum number of measured
    requests.
    """

    concurrency: int
    max_in_flight: int
    max_requests: int | None

    @classmethod
    def from_plan(cls, plan: LoadPlan, worker: int, num_workers: int) -> "Share":
        """Return the part of process `worker`, counted from 0. `max_requests` is None if the plan
        has no limit, and in an open loop, where the schedule limits the number of requests.
        """
        is_bounded = plan.max_requests is not None and not plan.is_open_loop
        return cls(
            concurrency=part_of(plan.concurrency or 0, worker, num_workers),
            max_in_flight=max(1, part_of(plan.max_in_flight, worker, num_workers)),
            max_requests=part_of(plan.max_requests or 0, worker, num_workers)
            if is_bounded
            else None,
        )


class Driver:
    """Executes one run in one process. `requests`: the requests that this process sends. `clock`
    returns seconds since the run's start, negative before it.
    """

    def __init__(
        self,
        plan: LoadPlan,
        share: Share,
        requests: Iterator[PlannedRequest],
        generate: Generate,
        clock: Callable[[], float],
    ) -> None:
        self.recorder = LoadRecorder.from_plan(plan)
        self.num_sent = 0
        self.num_ended = 0
        self.num_failed = 0
        self._plan = plan
        self._share = share
        self._requests = requests
        self._generate = generate
        self._clock = clock
        self._prompts = RandomPromptMaker(plan)

    async def run(self) -> None:
        """Send the requests and wait until they have ended, within the plan's time limits."""
        left_s = self._plan.end_s + self._plan.drain_s - self._clock()
        # At the time limit, open requests are cancelled and recorded as abandoned.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                if self._plan.is_open_loop:
                    await self._run_open()
                else:
                    await self._run_closed()

    async def _run_open(self) -> None:
        next_request: PlannedRequest | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for next_request in self._requests:
                    # Generated before it is due, because a long prompt takes milliseconds.
                    token_ids = self._prompts.token_ids(next_request)
                    await self._wait_until(next_request.at_s)
                    request, next_request = next_request, None
                    if self.num_sent - self.num_ended >= self._share.max_in_flight:
                        self.recorder.drop(request.at_s)
                        continue
                    self.num_sent += 1
                    group.create_task(self._send(request, token_ids, request.at_s))
        finally:
            # Requests due before the end of the run that were not sent count as dropped.
            if next_request is not None:
                self.recorder.drop(next_request.at_s)
            for request in self._requests:
                self.recorder.drop(request.at_s)

    async def _run_closed(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._share.concurrency):
                group.create_task(self._keep_sending())

    async def _keep_sending(self) -> None:
        await self._wait_until(0.0)
        for request in self._requests:
            token_ids = self._prompts.token_ids(request)
            # The wait may have ended a microsecond early.
            now_s = max(0.0, self._clock())
            if now_s >= self._plan.end_s or self.num_sent == self._share.max_requests:
                return
            self.num_sent += 1
            if not await self._send(request, token_ids, now_s):
                await asyncio.sleep(ERROR_PAUSE_S)

    async def _wait_until(self, at_s: float) -> None:
        """Wait until `at_s`; yield to the event loop even if it has passed."""
        left_s = at_s - self._clock()
        await asyncio.sleep(max(left_s, 0.0))
        # Event loops round timers to milliseconds, so the sleep may end too early.
        while (left_s := at_s - self._clock()) > _RESOLUTION_S:  # noqa: ASYNC110 - no event for a time
            await asyncio.sleep(left_s)

    async def _send(self, request: PlannedRequest, token_ids: list[int], due_s: float) -> bool:
        """Send one request and read its stream to the end; return whether it completed."""
        record = self.recorder.begin(due_s, self._clock(), request.row.num_output_tokens)
        try:
            async with aclosing(self._generate(request, token_ids)) as events:
                return await self._read(events, record)
        except PenstockError as error:
            record.failed(error.code.name, error.reason)
            self.num_failed += 1
            return False
        except asyncio.CancelledError:
            record.abandoned()
            raise
        finally:
            self.num_ended += 1

    async def _read(self, events: AsyncGenerator[Event, None], record: OpenRequest) -> bool:
        has_finished = False
        # Read to the end: closing a stream early cancels it.
        async for event in events:
            match event:
                case Tokens():
                    record.tokens(self._clock(), event.num_tokens)
                case Finished():
                    record.finished(self._clock(), event)
                    has_finished = True
                case _:
                    pass
        return has_finished
