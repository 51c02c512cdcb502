"""Everybody without whom the service does not serve, and the tasks that keep them alive.

Owns who belongs to it: one who has handed over leaves it without anybody being missed. Does not
know what they do.
"""

import asyncio

from penstock.server.processes.exit_codes import EXIT_OK
from penstock.server.processes.slot import Slot


class Crew:
    """Slots and their keepers. Lives on one event loop."""

    def __init__(self) -> None:
        self._keepers: dict[Slot, asyncio.Task[int]] = {}
        self._leaving: set[Slot] = set()
        self._news = asyncio.Event()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All of them, those that are about to leave too."""
        return tuple(self._keepers)

    @property
    def keepers(self) -> tuple["asyncio.Task[int]", ...]:
        """Their tasks, in the same order."""
        return tuple(self._keepers.values())

    def keeper_of(self, slot: Slot) -> "asyncio.Task[int]":
        """The task of one that is in it."""
        return self._keepers[slot]

    def join(self, slot: Slot) -> "asyncio.Task[int]":
        """Have a slot kept alive from now on; its task."""
        keeper = asyncio.create_task(slot.keep_alive(), name=slot.name)
        self._keepers[slot] = keeper
        keeper.add_done_callback(lambda _: self._news.set())
        return keeper

    def let_go(self, slot: Slot) -> None:
        """The end of this one is no loss."""
        self._leaving.add(slot)

    def hold(self, slot: Slot) -> None:
        """The end of this one is a loss after all."""
        self._leaving.discard(slot)
        self._news.set()

    def forget(self, slot: Slot) -> None:
        """It has ended, and is no part of this any more."""
        self._leaving.discard(slot)
        del self._keepers[slot]

    async def all_ready(self) -> None:
        """Return when everybody has been ready."""
        for slot in self.slots:
            await slot.is_ready.wait()

    async def someone_lost(self) -> None:
        """Return when a place stays empty that should not."""
        while not self.has_lost:
            self._news.clear()
            await self._news.wait()

    @property
    def has_lost(self) -> bool:
        """Whether a place stays empty that should not."""
        return any(
            keeper.done() for slot, keeper in self._keepers.items() if slot not in self._leaving
        )

    def raise_first(self) -> None:
        """Raise what ended a slot, if something did."""
        for slot, keeper in self._keepers.items():
            if keeper.done() and slot not in self._leaving:
                keeper.result()

    def has_given_up(self, slot: Slot) -> bool:
        """Whether a slot stays empty because its processes keep dying."""
        keeper = self._keepers[slot]
        return keeper.done() and not keeper.cancelled() and keeper.exception() is not None

    def ended_badly(self, slot: Slot) -> bool:
        """Whether a slot has not ended, or not in order.

        How one ended that has been followed, or was only to follow, is no matter.
        """
        keeper = self._keepers[slot]
        if slot in self._leaving:
            return not keeper.done()
        return (
            not keeper.done()
            or keeper.cancelled()
            or keeper.exception() is not None
            or keeper.result() != EXIT_OK
        )
