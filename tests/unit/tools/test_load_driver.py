"""Requests are sent on schedule, their number is limited, and the time until a late request is sent
counts in its latency. The tests run in virtual time.
"""

import asyncio
import itertools
import selectors
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import grpc
import pytest

from penstock.client import Event, Failure, PenstockError, QueueFull
from penstock.tools.bench.driver import Driver, Share
from penstock.tools.bench.plan import Arrivals, LoadPlan
from penstock.tools.bench.schedule import PlannedRequest, planned_requests
from support.load_events import finished, plan, tokens

# An event loop in virtual time: a sleeper wakes at once when all others sleep.

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """A selector that does not wait, but adds the timeout to `now_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for somebody else"
            self.now_s += max(timeout, 0.0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which begins at 0 s."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


SERVICE_S = 0.01


class Server:
    """A client whose server takes 10 ms for each request, however many are open, except during a
    stall.
    """

    def __init__(self, stall: tuple[float, float] = (0.0, 0.0)) -> None:
        self.stall = stall
        self.sent_s: list[float] = []
        self.num_open = 0
        self.max_num_open = 0
        self.num_closed_early = 0

    async def generate(
        self, request: PlannedRequest, token_ids: list[int]
    ) -> AsyncGenerator[Event, None]:
        assert len(token_ids) == request.row.num_prompt_tokens
        self.sent_s.append(now_s := asyncio.get_running_loop().time())
        self.num_open += 1
        self.max_num_open = max(self.max_num_open, self.num_open)
        try:
            if self.stall[0] <= now_s < self.stall[1]:
                await asyncio.sleep(self.stall[1] - now_s)
            await asyncio.sleep(SERVICE_S)
            yield tokens(request.row.num_output_tokens)
            yield finished(request.row.num_output_tokens)
        except (GeneratorExit, asyncio.CancelledError):
            self.num_closed_early += 1
            raise
        finally:
            self.num_open -= 1


class Rejecting(Server):
    """A client whose server rejects every second request."""

    async def generate(
        self, request: PlannedRequest, token_ids: list[int]
    ) -> AsyncGenerator[Event, None]:
        async for event in super().generate(request, token_ids):
            if request.index % 2:
                raise rejection()
            yield event


def rejection() -> PenstockError:
    return QueueFull(
        Failure(
            code=grpc.StatusCode.RESOURCE_EXHAUSTED,
            reason="QUEUE_FULL",
            message="the queue is full",
        )
    )


def drive(
    made: LoadPlan, server: Server, clock: Callable[[], float] | None = None, **share: Any
) -> Driver:
    async def run() -> Driver:
        loop = asyncio.get_running_loop()
        part = Share.from_plan(made, 0, 1)
        if share:
            part = Share(concurrency=0, max_requests=None, **share)
        driver = Driver(made, part, planned_requests(made), server.generate, clock or loop.time)
        await driver.run()
        return driver

    return run_virtually(run())


def closed(**settings: Any) -> LoadPlan:
    return plan(arrivals=Arrivals.CLOSED, **settings)


def test_requests_are_sent_when_they_are_due() -> None:
    server = Server()
    recorder = drive(plan(rate_per_s=4.0, duration_s=1.0), server).recorder

    assert server.sent_s == [0.0, 0.25, 0.5, 0.75]
    assert recorder.num_completed == 4
    assert recorder.ttft.max_s == pytest.approx(SERVICE_S)
    assert recorder.lateness.max_s == 0.0


def test_a_stall_of_the_server_is_in_the_percentiles() -> None:
    """The server stalls for one second of ten, so a tenth of the requests wait, for 0 to 1 s."""
    recorder = drive(plan(rate_per_s=100.0), Server(stall=(4.0, 5.0))).recorder

    assert recorder.num_completed == 1000
    assert recorder.ttft.percentile_s(89.0) == pytest.approx(SERVICE_S, rel=1e-2)
    assert recorder.ttft.percentile_s(95.0) == pytest.approx(0.51, abs=0.02)
    assert recorder.ttft.percentile_s(99.0) == pytest.approx(0.91, abs=0.02)


def test_a_closed_loop_hides_a_stall_of_the_server() -> None:
    """With one client that sends after each answer, the same stall is one sample of a thousand."""
    recorder = drive(closed(concurrency=1), Server(stall=(4.0, 5.0))).recorder

    assert recorder.num_completed > 850
    assert recorder.ttft.max_s == pytest.approx(1.0, abs=0.02)
    assert recorder.ttft.percentile_s(99.0) == pytest.approx(SERVICE_S, rel=1e-2)


def test_a_stall_of_the_client_is_in_the_percentiles_too() -> None:
    """The client's clock jumps by a second, as if its process had not run for that time."""
    jump: list[float] = []

    def clock() -> float:
        now_s = asyncio.get_running_loop().time()
        if now_s >= 5.0 and not jump:
            jump.append(1.0)
        return now_s + sum(jump)

    recorder = drive(plan(rate_per_s=10.0), Server(), clock).recorder

    # Those that were due in the lost second were sent at its end.
    assert recorder.num_due == 100
    assert recorder.lateness.max_s == pytest.approx(1.0, abs=0.01)
    assert recorder.ttft.percentile_s(95.0) == pytest.approx(0.5, abs=0.11)
    assert recorder.ttft.max_s == pytest.approx(1.0 + SERVICE_S, abs=0.01)


def test_a_closed_loop_keeps_its_number_and_stops_with_the_time() -> None:
    server = Server()
    driver = drive(closed(concurrency=3, duration_s=1.0), server)

    assert server.max_num_open == 3
    # 10 ms each; a hundredth of a millisecond of float error may cost or save one round.
    assert driver.recorder.num_completed == pytest.approx(300, abs=3)


def test_a_closed_loop_stops_with_its_number_of_requests() -> None:
    driver = drive(closed(concurrency=3, max_requests=10), Server())

    assert driver.recorder.num_due == driver.recorder.num_completed == driver.num_sent == 10


def test_the_warm_up_of_a_closed_loop_ends_before_its_measurement_starts() -> None:
    made = closed(concurrency=3, warm_up_s=0.1, max_requests=10)
    warm_up, server = made.warm_up(), Server()
    assert warm_up is not None
    assert (warm_up.end_s, warm_up.warm_up()) == (0.1, None)

    assert drive(warm_up, server).num_sent == pytest.approx(30, abs=3)
    assert server.num_open == 0
    # All of the second run count: none were sent by the first one.
    recorder = drive(made, server).recorder
    assert recorder.num_due == recorder.num_completed == 10
    assert recorder.ttft.max_s == pytest.approx(SERVICE_S)


def test_a_loop_without_a_warm_up_and_an_open_one_are_a_single_run() -> None:
    assert closed(concurrency=3).warm_up() is None
    assert plan(warm_up_s=1.0).warm_up() is None


def test_a_clock_that_is_early_by_rounding_costs_no_request() -> None:
    def clock() -> float:
        return asyncio.get_running_loop().time() - 5e-7

    driver = drive(closed(concurrency=3, max_requests=3), Server(), clock)

    assert driver.recorder.num_due == driver.num_sent == 3


def test_a_closed_loop_pauses_after_a_failure() -> None:
    driver = drive(closed(concurrency=1, duration_s=10.0), Rejecting())

    # 10 ms and 10 ms, and 50 ms for the failure; without a pause it would be a thousand.
    assert driver.num_sent == pytest.approx(2 * 10.0 / 0.07, abs=3)


def test_failures_are_counted_by_status_and_reason() -> None:
    driver = drive(plan(rate_per_s=10.0, duration_s=1.0), Rejecting())

    assert driver.recorder.errors == {("RESOURCE_EXHAUSTED", "QUEUE_FULL"): 5}
    assert (driver.recorder.num_completed, driver.num_failed, driver.num_ended) == (5, 5, 10)


def test_requests_beyond_the_concurrency_limit_are_dropped_and_counted() -> None:
    server = Server(stall=(0.0, 5.0))
    recorder = drive(plan(rate_per_s=10.0), server, max_in_flight=20).recorder

    assert server.max_num_open == 20
    assert (recorder.num_due, recorder.num_dropped) == (100, 31)
    assert recorder.num_completed == 69


def test_a_server_that_never_answers_does_not_block_the_run() -> None:
    server = Server(stall=(5.0, 1e9))

    async def run() -> tuple[Driver, float]:
        loop = asyncio.get_running_loop()
        made = plan(rate_per_s=10.0, drain_s=7.0)
        driver = Driver(
            made, Share.from_plan(made, 0, 1), planned_requests(made), server.generate, loop.time
        )
        await driver.run()
        return driver, loop.time()

    driver, ended_s = run_virtually(run())

    assert ended_s == pytest.approx(17.0)
    assert driver.recorder.num_unfinished == 50
    assert server.num_closed_early == 50  # their calls were cancelled
    assert server.num_open == 0


def test_requests_due_after_the_time_limit_are_dropped_and_counted() -> None:
    made = plan(rate_per_s=10.0, drain_s=0.0)

    def clock() -> float:
        # From the fifth second on, the client runs at a tenth of the speed of the world.
        now_s = asyncio.get_running_loop().time()
        return now_s if now_s < 5.0 else 5.0 + (now_s - 5.0) / 10.0

    recorder = drive(made, Server(), clock).recorder

    # The bound came at 10 s of the loop's time, 5.5 s of the run's.
    assert recorder.num_due == 100
    assert recorder.num_dropped == 44
    assert recorder.num_completed + recorder.num_unfinished == 56


def test_an_internal_error_ends_the_run_and_is_raised() -> None:
    class Broken(Server):
        def generate(
            self, request: PlannedRequest, token_ids: list[int]
        ) -> AsyncGenerator[Event, None]:
            raise ValueError("sampling.temperature")

    with pytest.RaisesGroup(ValueError):
        drive(plan(rate_per_s=10.0), Broken())


def test_a_load_is_divided_among_processes() -> None:
    made = closed(concurrency=5, max_requests=11, max_in_flight=7)
    parts = [Share.from_plan(made, worker, 3) for worker in range(3)]

    assert [part.concurrency for part in parts] == [2, 2, 1]
    assert [part.max_requests for part in parts] == [4, 4, 3]
    assert sum(part.max_in_flight for part in parts) == 7
    assert list(itertools.islice((r.at_s for r in planned_requests(made)), 2)) == [0.0, 0.0]
