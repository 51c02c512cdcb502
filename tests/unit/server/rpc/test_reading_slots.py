"""Which calls may read a message if there are more calls than slots."""

from __future__ import annotations

import asyncio

import pytest

from penstock.server.rpc.reading_slots import ReadingSlot, ReadingSlots

MAX_NUM, MAX_PER_CALLER, YIELD_AFTER_S = 4, 2, 10.0


class FakeDeadline:
    """A deadline that records the time to which it is rescheduled."""

    def __init__(self) -> None:
        self.at_s: float | None = None

    def expired(self) -> bool:
        return False

    def reschedule(self, when: float | None) -> None:
        self.at_s = when


class Harness:
    """Reading slots, and a clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slots = ReadingSlots(
            max_num=MAX_NUM,
            max_per_caller=MAX_PER_CALLER,
            yield_after_s=YIELD_AFTER_S,
            clock=lambda: self.now_s,
        )

    async def held(self, *callers: str) -> list[ReadingSlot]:
        return [await self.slots.acquire(caller, FakeDeadline()) for caller in callers]

    async def waiting(self, caller: str) -> asyncio.Task[ReadingSlot]:
        """Start a call that gets no slot yet; return its task."""
        task = asyncio.create_task(self.slots.acquire(caller, FakeDeadline()))
        await asyncio.sleep(0)
        assert not task.done()
        return task


def must_yield(slots: list[ReadingSlot]) -> list[bool]:
    return [isinstance(s.deadline, FakeDeadline) and s.deadline.at_s is not None for s in slots]


async def test_one_caller_gets_no_more_than_its_share_of_slots() -> None:
    harness = Harness()
    slots = await harness.held("a", "a")
    waiting = await harness.waiting("a")
    await harness.held("b", "b")
    assert harness.slots.num_held == MAX_NUM
    harness.slots.release(slots[0])
    assert (await waiting).caller == "a"


async def test_callers_take_turns() -> None:
    harness = Harness()
    slots = await harness.held("a", "a", "b", "b")
    first, second = await harness.waiting("a"), await harness.waiting("a")
    other = await harness.waiting("c")
    harness.slots.release(slots[0])
    await first
    harness.slots.release(slots[1])
    # However many more of the first are waiting, and have for longer.
    await other
    assert not second.done()
    harness.slots.release(slots[2])
    await second


async def test_only_slots_that_other_calls_wait_for_get_a_read_deadline() -> None:
    harness = Harness()
    slots = await harness.held("a", "a", "b")
    waiting = await harness.waiting("a")
    harness.now_s += YIELD_AFTER_S
    harness.slots.expire_slow()
    assert must_yield(slots) == [True, True, False]
    slots += await harness.held("b")
    harness.slots.expire_slow()
    # No slot is free: now all must yield, except new ones.
    assert must_yield(slots) == [True, True, True, False]
    harness.slots.release(slots[0])
    await waiting


async def test_a_message_that_has_arrived_has_no_read_deadline() -> None:
    harness = Harness()
    slots = await harness.held("a", "a")
    harness.slots.note_arrival(slots[0])
    waiting = await harness.waiting("a")
    harness.now_s += YIELD_AFTER_S
    harness.slots.expire_slow()
    assert must_yield(slots) == [False, True]
    harness.slots.release(slots[0])
    await waiting


async def test_no_call_gets_a_deadline_while_no_other_waits() -> None:
    harness = Harness()
    slots = await harness.held("a", "a")
    harness.now_s += 100 * YIELD_AFTER_S
    harness.slots.expire_slow()
    assert must_yield(slots) == [False, False]


async def test_a_cancelled_waiter_takes_no_slot() -> None:
    harness = Harness()
    slots = await harness.held("a", "a", "b", "b")
    gone, stays = await harness.waiting("a"), await harness.waiting("a")
    gone.cancel()
    harness.slots.release(slots[0])
    await stays
    assert harness.slots.num_held == MAX_NUM
    late = await harness.waiting("c")
    harness.slots.release(slots[1])
    # It was given the slot, and left before it had.
    late.cancel()
    await asyncio.wait([gone, late])
    assert harness.slots.num_held == MAX_NUM - 1
    await harness.held("c")


async def test_a_slow_sender_is_ended_once_another_waits() -> None:
    slots = ReadingSlots(max_num=1, max_per_caller=1, yield_after_s=0.01)
    begun = asyncio.Event()

    async def slow() -> None:
        async with asyncio.timeout(3600) as deadline:
            slot = await slots.acquire("slow", deadline)
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                slots.release(slot)

    task = asyncio.create_task(slow())
    await begun.wait()
    async with asyncio.timeout(30) as deadline:
        await slots.acquire("quick", deadline)
    with pytest.raises(TimeoutError):
        await task
