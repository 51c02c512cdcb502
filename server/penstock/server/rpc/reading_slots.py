"""Limits how many messages are read at the same time, in total and per caller.

This limits the memory of partly received messages. When a read has started, the gRPC core receives
a message of any allowed size, however slowly it arrives; before that it buffers at most the
flow-control window of the stream (`options.py`). Reads are granted round-robin by caller. A slow
sender cannot block others: it must release its slot after `yield_after_s` if others wait.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Deadline(Protocol):
    """The part of `asyncio.Timeout` that is used here."""

    def expired(self) -> bool:
        """Return True if the deadline has passed."""
        ...

    def reschedule(self, when: float | None) -> None:
        """Move the deadline to `when`. Not allowed after it has expired."""
        ...


@dataclass(slots=True, eq=False)
class ReadingSlot:
    """A permit to read one message. `since_s` is the start of the read, infinite after the message
    has arrived."""

    caller: str
    deadline: Deadline
    since_s: float


Waiter = tuple[ReadingSlot, "asyncio.Future[None]"]


class ReadingSlots:
    """Grants at most `max_num` slots at a time, of which a caller may hold `max_per_caller`. Call
    all methods on one event loop.

    `yield_after_s` is how long a slot may be held while another read waits for it, in seconds.
    `clock` is the clock of the deadlines; None means the clock of the running event loop.
    """

    def __init__(
        self,
        *,
        max_num: int,
        max_per_caller: int,
        yield_after_s: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._max_num = max_num
        self._max_per_caller = max_per_caller
        self._yield_after_s = yield_after_s
        self._clock = clock or _loop_time
        self._held: dict[ReadingSlot, None] = {}
        self._num_held_by: dict[str, int] = {}
        # Callers in round-robin order.
        self._waiting: dict[str, deque[Waiter]] = {}
        self._expiry_timer: asyncio.TimerHandle | None = None

    @property
    def num_held(self) -> int:
        """Number of slots that are held."""
        return len(self._held)

    async def acquire(self, caller: str, deadline: Deadline) -> ReadingSlot:
        """Wait for a free slot and return it. If other reads still wait when the slot has been held
        for `yield_after_s`, `deadline` expires early."""
        slot = ReadingSlot(caller, deadline, 0.0)
        if self._can_hold(caller):
            self._grant(slot)
            return slot
        granted = asyncio.get_running_loop().create_future()
        waiter = (slot, granted)
        self._waiting.setdefault(caller, deque()).append(waiter)
        self._set_timer()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release(slot)
            else:
                self._remove_waiter(waiter)
            raise
        return slot

    def release(self, slot: ReadingSlot) -> None:
        """Release a slot, because its message was handled or will not arrive."""
        del self._held[slot]
        num_left = self._num_held_by[slot.caller] - 1
        if num_left:
            self._num_held_by[slot.caller] = num_left
        else:
            del self._num_held_by[slot.caller]
        if self._waiting:
            self._grant_waiting()

    def note_arrival(self, slot: ReadingSlot) -> None:
        """Record that the message has arrived in time, so that the slot does not expire before it
        is released."""
        slot.since_s = math.inf

    def expire_slow(self) -> None:
        """Expire the deadlines of slots that were held for `yield_after_s`, if no slot is free or
        another read of their caller waits."""
        now_s = self._clock()
        is_full = len(self._held) >= self._max_num
        for slot in self._held:
            if slot.since_s > now_s - self._yield_after_s:
                continue
            is_wanted = is_full or slot.caller in self._waiting
            if is_wanted and not slot.deadline.expired():
                slot.deadline.reschedule(now_s)

    def _can_hold(self, caller: str) -> bool:
        return (
            len(self._held) < self._max_num
            and self._num_held_by.get(caller, 0) < self._max_per_caller
        )

    def _grant(self, slot: ReadingSlot) -> None:
        slot.since_s = self._clock()
        self._held[slot] = None
        self._num_held_by[slot.caller] = self._num_held_by.get(slot.caller, 0) + 1

    def _grant_waiting(self) -> None:
        for caller in tuple(self._waiting):
            if len(self._held) >= self._max_num:
                return
            if not self._can_hold(caller):
                continue
            queue = self._waiting.pop(caller)
            while queue:
                slot, granted = queue.popleft()
                if not granted.done():
                    self._grant(slot)
                    granted.set_result(None)
                    break
            if queue:
                self._waiting[caller] = queue  # to the end of the order

    def _remove_waiter(self, waiter: Waiter) -> None:
        queue = self._waiting.get(waiter[0].caller)
        if queue is None:
            return
        with contextlib.suppress(ValueError):
            queue.remove(waiter)
        if not queue:
            del self._waiting[waiter[0].caller]

    def _set_timer(self) -> None:
        if self._expiry_timer is None:
            loop = asyncio.get_running_loop()
            self._expiry_timer = loop.call_later(self._yield_after_s / 4, self._on_timer)

    def _on_timer(self) -> None:
        self._expiry_timer = None
        if self._waiting:
            self.expire_slow()
            self._set_timer()


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
