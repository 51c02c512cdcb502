"""The connections of a client, and the admission of calls.

A channel is opened when a call first needs it. `pool.py` has the rules that admit a call and choose
its channel; this module calls them under a lock.
"""

import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc

from penstock.client.channel import ChannelConfig
from penstock.client.local_errors import client_closed, deadline_passed
from penstock.client.pool import Admission, ChannelPicker, PoolConfig, PoolState
from penstock.client.runtime import Runtime, Signal


class _Ticket:
    """A generation that waits for admission. Fields are written while the lock of `Connections` is
    held."""

    def __init__(self, signal: Signal) -> None:
        self.signal = signal
        self.is_admitted = False
        self.is_rejected = False


class Connections:
    """Channels to the targets, `num_channels` to each target.

    Used on one event loop or by any number of threads, depending on the runtime.
    """

    def __init__(
        self,
        runtime: Runtime,
        targets: Sequence[str],
        *,
        config: PoolConfig,
        channel: ChannelConfig,
        credentials: grpc.ChannelCredentials | None,
        clock: Callable[[], float],
    ) -> None:
        self._runtime = runtime
        self._targets = tuple(targets) * config.num_channels
        self._config = channel
        self._credentials = credentials
        self._clock = clock
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._picker = ChannelPicker(len(self._targets))
        self._admission: Admission[_Ticket] = Admission(config)
        self._lock = threading.Lock()
        self._idle_signal: Signal | None = None
        self._is_closing = False
        self.is_closed = False

    @property
    def addresses(self) -> str:
        """The targets, separated by commas."""
        return ",".join(dict.fromkeys(self._targets))

    @property
    def state(self) -> PoolState:
        """The current numbers of connections and generations."""
        with self._lock:
            return PoolState(
                num_channels=len(self._targets),
                num_open_channels=len(self._channels),
                num_open_calls=self._admission.num_open,
                num_waiting_calls=self._admission.num_waiting,
                is_closed=self._is_closing,
            )

    @asynccontextmanager
    async def admitted(self, timeout_s: float | None) -> AsyncGenerator[None, None]:
        """Wait until one more generation may be sent. It counts as open inside the `with` block.

        Raises BacklogFull immediately if too many generations wait, DeadlineExceeded after
        `timeout_s` seconds (None: no limit), CallCancelled if the connections are closed meanwhile,
        and RuntimeError if they were already closed.
        """
        ticket: _Ticket | None = None
        with self._lock:
            self.require_open()
            if not self._admission.try_admit():
                ticket = _Ticket(self._runtime.signal())
                self._admission.enqueue(ticket)
        if ticket is not None:
            await self._wait(ticket, timeout_s)
        try:
            yield
        finally:
            self._leave()

    def acquire(self) -> tuple[int, grpc.aio.Channel]:
        """Choose a channel for an attempt; return its index, for `release`, and the channel. Raises
        CallCancelled if the connections are closed."""
        with self._lock:
            if self.is_closed:
                raise client_closed()
            index = self._picker.pick(self._clock())
            if index not in self._channels:
                target = self._targets[index]
                options = self._config.options(target)
                self._channels[index] = self._runtime.channel(target, options, self._credentials)
            return index, self._channels[index]

    def release(self, index: int, *, is_unavailable: bool = False) -> None:
        """Record the end of an attempt on a channel. `is_unavailable` is True if no server
        responded on it."""
        with self._lock:
            self._picker.release(index, is_unavailable=is_unavailable, now_s=self._clock())

    def note_response(self, index: int) -> None:
        """Record that the server has responded on this channel."""
        with self._lock:
            self._picker.note_response(index)

    def is_disconnected(self, index: int) -> bool:
        """Return True if a channel is not connected now, or was not opened."""
        with self._lock:
            channel = self._channels.get(index)
        return channel is None or channel.get_state() is not grpc.ChannelConnectivity.READY

    def require_open(self) -> None:
        """Raise RuntimeError if no more calls are accepted."""
        if self._is_closing:
            raise RuntimeError("the client is closed")

    async def drain(self, drain_timeout_s: float) -> None:
        """Accept no more calls, reject waiting generations, and wait up to `drain_timeout_s`
        seconds for open generations."""
        with self._lock:
            self._is_closing = True
            for ticket in self._admission.reject_all():
                ticket.is_rejected = True
                ticket.signal.set()
            if drain_timeout_s <= 0 or not self._admission.num_open:
                return
            signal = self._idle_signal = self._idle_signal or self._runtime.signal()
        await signal.wait(drain_timeout_s)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        with self._lock:
            self._is_closing = self.is_closed = True
            channels = tuple(self._channels.values())
            self._channels.clear()
        for channel in channels:
            await channel.close()

    async def _wait(self, ticket: _Ticket, timeout_s: float | None) -> None:
        try:
            await ticket.signal.wait(timeout_s)
        except BaseException:
            # After a cancelled task or Ctrl-C, an admission that was just granted passes to the
            # next call.
            self._stop_waiting(ticket)
            if ticket.is_admitted:
                self._leave()
            raise
        self._stop_waiting(ticket)
        if not ticket.is_admitted:
            raise client_closed() if ticket.is_rejected else deadline_passed()

    def _stop_waiting(self, ticket: _Ticket) -> None:
        with self._lock:
            self._admission.try_remove(ticket)

    def _leave(self) -> None:
        with self._lock:
            ticket = self._admission.release()
            if ticket is not None:
                ticket.is_admitted = True
                ticket.signal.set()
            elif self._idle_signal is not None and not self._admission.num_open:
                self._idle_signal.set()
