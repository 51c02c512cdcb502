"""The connections of the asyncio client, and the wait for a turn.

Owns the channels of grpc.aio, each made when a call first needs it. Which one a call takes, and
whether it may go, is decided in `pool.py`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc

from penstock.client.channel import ChannelConfig
from penstock.client.own_failures import client_closed, deadline_passed
from penstock.client.pool import Admission, ChannelPicker, PoolConfig, PoolState


class AsyncPool:
    """Channels to the targets, `num_channels` to each. Belongs to one event loop."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        config: PoolConfig,
        channel: ChannelConfig,
        credentials: grpc.ChannelCredentials | None,
        clock: Callable[[], float],
    ) -> None:
        self._targets = tuple(targets) * config.num_channels
        self._config = channel
        self._credentials = credentials
        self._clock = clock
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._picker = ChannelPicker(len(self._targets))
        self._admission: Admission[asyncio.Future[None]] = Admission(config)
        self._when_idle: asyncio.Event | None = None
        self._is_closing = False
        self.is_closed = False

    @property
    def state(self) -> PoolState:
        """A snapshot."""
        return PoolState(
            num_channels=len(self._targets),
            num_open_channels=len(self._channels),
            num_open_calls=self._admission.num_open,
            num_waiting_calls=self._admission.num_waiting,
            is_closed=self._is_closing,
        )

    @asynccontextmanager
    async def turn(self, timeout_s: float | None) -> AsyncGenerator[None, None]:
        """Hold a place among the open calls.

        Raises BacklogFull at once, DeadlineExceeded after `timeout_s`, CallCancelled when the pool
        closes meanwhile, RuntimeError when it has.
        """
        self.require_open()
        if not self._admission.can_enter():
            await self._wait(timeout_s)
        try:
            yield
        finally:
            self._leave()

    def take(self) -> tuple[int, grpc.aio.Channel]:
        """Take a channel for one attempt; its number is for `release`. CallCancelled if closed."""
        if self.is_closed:
            raise client_closed()
        index = self._picker.pick(self._clock())
        if index not in self._channels:
            self._channels[index] = self._open(self._targets[index])
        return index, self._channels[index]

    def release(self, index: int, *, is_unavailable: bool = False) -> None:
        """The attempt is over."""
        self._picker.release(index, is_unavailable=is_unavailable, now_s=self._clock())

    def answered(self, index: int) -> None:
        """The server has said something on this channel."""
        self._picker.answered(index)

    def is_lost(self, index: int) -> bool:
        """Whether there is no connection behind a channel."""
        channel = self._channels.get(index)
        return channel is None or channel.get_state() is not grpc.ChannelConnectivity.READY

    def require_open(self) -> None:
        """Raise RuntimeError on a pool that takes no more calls."""
        if self._is_closing:
            raise RuntimeError("the client is closed")

    async def drain(self, grace_s: float) -> None:
        """Take no more calls, send those that wait away, and wait for the open ones."""
        self._is_closing = True
        for ticket in self._admission.send_away():
            if not ticket.done():
                ticket.set_exception(client_closed())
        if grace_s > 0 and self._admission.num_open:
            self._when_idle = asyncio.Event()
            try:
                async with asyncio.timeout(grace_s):
                    await self._when_idle.wait()
            except TimeoutError:
                return  # what is left is cancelled by the one who asked

    async def close(self) -> None:
        """Hang up. May be called twice."""
        self._is_closing = self.is_closed = True
        channels = tuple(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close()

    async def _wait(self, timeout_s: float | None) -> None:
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._admission.wait(ticket)
        try:
            async with asyncio.timeout(timeout_s):
                await ticket
        except TimeoutError:
            self._give_up(ticket)
            raise deadline_passed() from None
        except asyncio.CancelledError:
            self._give_up(ticket)
            raise

    def _give_up(self, ticket: "asyncio.Future[None]") -> None:
        """The place may have come in the same moment; then it goes on to the next."""
        if self._admission.can_give_up(ticket):
            return
        if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
            self._leave()

    def _leave(self) -> None:
        while (ticket := self._admission.leave()) is not None:
            if not ticket.done():
                ticket.set_result(None)
                return
        if self._when_idle is not None and not self._admission.num_open:
            self._when_idle.set()

    def _open(self, target: str) -> grpc.aio.Channel:
        options = self._config.options(target)
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, self._credentials, options=options)
