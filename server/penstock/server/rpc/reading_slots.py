"""Limits how many messages are read at a time, in total and per caller.

Owns the limit on the memory of partly received messages. Once a read starts, the core receives a
message of any allowed size, however slowly it arrives; before that it buffers next to nothing
(`options.py`). So reads are limited, in total and per caller, and granted round-robin by caller. A
slow sender cannot block others: a slot for which others wait must be released after a while.
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
        """Whether it has expired."""
        ...

    def reschedule(self, when: float | None) -> None:
        """Move the deadline to `when`; not allowed once it has expired."""
        ...


@dataclass(slots=True, eq=False)
class Slot:
    """The right to read one message. `since_s`: start of the read, infinite once the message has
    arrived.
    """

    caller: str
    deadline: Deadline
    since_s: float


Waiter = tuple[Slot, "asyncio.Future[None]"]


class ReadingSlots:
    """At most `max_num` slots, of these `max_per_caller` per caller; lives on one event loop.

    `yield_after_s`: how long a slot may be held while another caller waits. `clock`: the clock of
    the deadlines; None for the running loop's.
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
        self._held: dict[Slot, None] = {}
        self._num_held_by: dict[str, int] = {}
        # Callers in round-robin order.
        self._waiting: dict[str, deque[Waiter]] = {}
        self._expiry_timer: asyncio.TimerHandle | None = None

    @property
    def num_held(self) -> int:
        """Number of messages that are being read."""
        return len(self._held)

    async def take(self, caller: str, deadline: Deadline) -> Slot:
        """Wait for a free slot and return it. `deadline` is moved up when others need the slot."""
        slot = Slot(caller, deadline, 0.0)
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
                self.give_back(slot)
            else:
                self._remove_waiter(waiter)
            raise
        return slot

    def give_back(self, slot: Slot) -> None:
        """Release a slot: its message was handled, or will not arrive."""
        del self._held[slot]
        num_left = self._num_held_by[slot.caller] - 1
        if num_left:
            self._num_held_by[slot.caller] = num_left
        else:
            del self._num_held_by[slot.caller]
        if self._waiting:
            self._grant_waiting()

    def note_arrival(self, slot: Slot) -> None:
        """Note that the message has arrived and waits to be handled: it cannot be late any more."""
        slot.since_s = math.inf

    def expire_slow(self) -> None:
        """Expire the deadlines of slots that were held long enough and for which others wait."""
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

    def _grant(self, slot: Slot) -> None:
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
