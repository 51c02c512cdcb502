"""`penstock demo --deadline`: twice the capacity is offered, and each request has a deadline of two
seconds.

The same requests are sent to two services at the same time: one with deadline prediction (the
default), and one first come, first served without prediction.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

from penstock.client import Client, DeadlineExceeded, DeadlineUnreachable
from penstock.server.cli.command import ExitCode
from penstock.server.cli.report import table_lines
from penstock.tools.own_service import OwnService

T = TypeVar("T")
_NUM_SLOTS = 16
SERVE_ARGS = ("--max-num-seqs", str(_NUM_SLOTS))
_DEADLINE_S = 2.0
_NUM_TOKENS = 50
_SECONDS = 4.0
_LOAD = 2.0
_NUM_WAVES = 2
_OUTCOMES = _IN_TIME, _REJECTED, _ENDED, _LATE = ("in time", "rejected", "ended early", "too late")
"""Rejected: predicted to be late before its first token, on arrival or while it waited. Ended
early: predicted to be late while it ran. Too late: the deadline passed.
"""
_MOST_IN_TIME = 0.8
"""If a larger share of requests is in time, the load was not an overload. At twice the capacity, at
most 3/4 can be in time: 4 s of arrivals are 8 s of work, of which 6 s fit (arrivals and a deadline
of 2 s).
"""


async def deadline_scene(predicting: OwnService, fcfs: OwnService) -> int:
    """Send the load to both running services and print the outcomes; return the exit code.
    `predicting` rejects requests predicted to be late, `fcfs` does not. Raises PenstockError if a
    request fails for another reason than its deadline.
    """
    async with Client(predicting.address) as client:
        rate = await measured_capacity(client)
    print(
        f"a service completes about {rate:.1f} such answers/s; now {_LOAD * rate:.1f}/s come to"
        f" each, due within {_DEADLINE_S:g} s ...",
        flush=True,
    )
    async with Client(predicting.address) as one, Client(fcfs.address) as other:
        predicted, in_order = await _together(
            _offer(one, _LOAD * rate), _offer(other, _LOAD * rate)
        )
    counts = {"predicted deadlines (the default)": predicted, "first come, first served": in_order}
    header = ("ORDER", *(outcome.upper() for outcome in _OUTCOMES))
    rows = [(name, *(str(count[each]) for each in _OUTCOMES)) for name, count in counts.items()]
    print("\n".join(["", *table_lines([header, *rows]), ""]), flush=True)
    most_in_time = max(count[_IN_TIME] / count.total() for count in counts.values())
    if not was_overload(most_in_time):
        print(
            f"no overload: {most_in_time:.0%} of the requests were in time, so the load was not"
            f" {_LOAD:g} times the capacity; run it again when no other program is busy",
            flush=True,
        )
        return ExitCode.FAILED
    if predicted[_IN_TIME] <= in_order[_IN_TIME]:
        print(
            "no difference: other programs changed the speed of this machine meanwhile; run it"
            " again when no other program is busy",
            flush=True,
        )
        return ExitCode.FAILED
    print(
        f"Under the same overload, {predicted[_IN_TIME]} answers instead of {in_order[_IN_TIME]}"
        " were in time:\nwhat is predicted to be late is rejected, on arrival or while it waits, or"
        " ended while\nit runs, which leaves the capacity to the others.",
        flush=True,
    )
    return ExitCode.OK


def was_overload(most_in_time: float) -> bool:
    """Return whether the load exceeded the capacity. `most_in_time`: the share of requests that
    completed in time, of the service where it is higher.
    """
    return most_in_time <= _MOST_IN_TIME


async def measured_capacity(client: Client) -> float:
    """Return the requests per second with all slots busy: the rate of the fastest of two full
    batches after a warm-up.

    The fastest is used because other programs can only lower the rate.
    """
    now = asyncio.get_running_loop().time
    waves_s: list[float] = []
    for _ in range(1 + _NUM_WAVES):
        started_s = now()
        await _together(*(_answer(client, seed, None) for seed in range(_NUM_SLOTS)))
        waves_s.append(now() - started_s)
    return _NUM_SLOTS / min(waves_s[1:])


async def _offer(client: Client, rate: float) -> Counter[str]:
    """Send `rate` requests per second for `_SECONDS`; return the number of requests by outcome."""
    num_requests = round(rate * _SECONDS)
    return Counter(
        await _together(*(_outcome(client, seed, seed / rate) for seed in range(num_requests)))
    )


async def _together(*calls: Coroutine[Any, Any, T]) -> list[T]:
    """Run the calls concurrently and return their results. The first error cancels the other calls
    and is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _outcome(client: Client, seed: int, wait_s: float) -> str:
    """Send a request after a wait, and return its outcome."""
    await asyncio.sleep(wait_s)
    now = asyncio.get_running_loop().time
    started_s = now()
    try:
        await _answer(client, seed, _DEADLINE_S)
    except DeadlineExceeded as error:
        return outcome_of(error)
    return _IN_TIME if now() - started_s <= _DEADLINE_S else _LATE


def outcome_of(error: DeadlineExceeded) -> str:
    """Return the outcome of a request that failed because of its deadline."""
    if not isinstance(error, DeadlineUnreachable):
        return _LATE
    return _REJECTED if error.metadata.get("state") == "PENDING" else _ENDED


async def _answer(client: Client, seed: int, deadline_s: float | None) -> None:
    async for _ in client.generate(
        "ROMEO:\n", max_tokens=_NUM_TOKENS, seed=seed, deadline_s=deadline_s
    ):
        pass
