"""The connections of the blocking client, and the wait for a turn.

Owns the channels of gRPC, each made when a call first needs it, and the lock around the rules of
`pool.py`, which decide which channel a call takes and whether it may go.
"""

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import grpc

from penstock.client.channel import ChannelConfig
from penstock.client.own_failures import client_closed, deadline_passed
from penstock.client.pool import Admission, ChannelPicker, PoolConfig, PoolState

_STATE_PATIENCE_S = 1.0


class _Ticket:
    """One thread's wait for a place. Written under the pool's lock."""

    def __init__(self) -> None:
        self.has_news = threading.Event()
        self.has_place = False
        self.is_sent_away = False


class SyncPool:
    """Channels to the targets, `num_channels` to each. Any number of threads may use it."""

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
        self._channels: dict[int, grpc.Channel] = {}
        self._picker = ChannelPicker(len(self._targets))
        self._admission: Admission[_Ticket] = Admission(config)
        self._lock = threading.Lock()
        self._has_idled = threading.Condition(self._lock)
        self._is_closing = False
        self.is_closed = False

    @property
    def state(self) -> PoolState:
        """A snapshot."""
        with self._lock:
            return PoolState(
                num_channels=len(self._targets),
                num_open_channels=len(self._channels),
                num_open_calls=self._admission.num_open,
                num_waiting_calls=self._admission.num_waiting,
                is_closed=self._is_closing,
            )

    @contextmanager
    def turn(self, timeout_s: float | None) -> Generator[None, None, None]:
        """Hold a place among the open calls.

        Raises BacklogFull at once, DeadlineExceeded after `timeout_s`, CallCancelled when the pool
        closes meanwhile, RuntimeError when it has.
        """
        ticket: _Ticket | None = None
        with self._lock:
            self.require_open()
            if not self._admission.can_enter():
                ticket = _Ticket()
                self._admission.wait(ticket)
        if ticket is not None:
            self._wait(ticket, timeout_s)
        try:
            yield
        finally:
            self._leave()

    def take(self) -> tuple[int, grpc.Channel]:
        """Take a channel for one attempt; its number is for `release`. CallCancelled if closed."""
        with self._lock:
            if self.is_closed:
                raise client_closed()
            index = self._picker.pick(self._clock())
            if index not in self._channels:
                self._channels[index] = self._open(self._targets[index])
            return index, self._channels[index]

    def release(self, index: int, *, is_unavailable: bool = False) -> None:
        """The attempt is over."""
        with self._lock:
            self._picker.release(index, is_unavailable=is_unavailable, now_s=self._clock())

    def answered(self, index: int) -> None:
        """The server has said something on this channel."""
        with self._lock:
            self._picker.answered(index)

    def is_lost(self, index: int) -> bool:
        """Whether there is no connection behind a channel. Takes a moment."""
        with self._lock:
            channel = self._channels.get(index)
        return channel is None or _state_of(channel) is not grpc.ChannelConnectivity.READY

    def require_open(self) -> None:
        """Raise RuntimeError on a pool that takes no more calls."""
        if self._is_closing:
            raise RuntimeError("the client is closed")

    def drain(self, grace_s: float) -> None:
        """Take no more calls, send those that wait away, and wait for the open ones."""
        with self._lock:
            self._is_closing = True
            for ticket in self._admission.send_away():
                ticket.is_sent_away = True
                ticket.has_news.set()
            if grace_s > 0:
                self._has_idled.wait_for(lambda: not self._admission.num_open, grace_s)

    def close(self) -> None:
        """Hang up, which cancels what is open. May be called twice."""
        with self._lock:
            self._is_closing = self.is_closed = True
            channels = tuple(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()

    def _wait(self, ticket: _Ticket, timeout_s: float | None) -> None:
        try:
            ticket.has_news.wait(timeout_s)
        except BaseException:
            # Ctrl-C, most likely: a place that came in the same moment goes on to the next.
            self._stop_waiting(ticket)
            if ticket.has_place:
                self._leave()
            raise
        self._stop_waiting(ticket)
        if not ticket.has_place:
            raise client_closed() if ticket.is_sent_away else deadline_passed()

    def _stop_waiting(self, ticket: _Ticket) -> None:
        with self._lock:
            self._admission.can_give_up(ticket)

    def _leave(self) -> None:
        with self._lock:
            ticket = self._admission.leave()
            if ticket is not None:
                ticket.has_place = True
                ticket.has_news.set()
            elif not self._admission.num_open:
                self._has_idled.notify_all()

    def _open(self, target: str) -> grpc.Channel:
        options = self._config.options(target)
        if self._credentials is None:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, self._credentials, options=options)


def _state_of(channel: grpc.Channel) -> grpc.ChannelConnectivity | None:
    """What gRPC says of a channel's connection; None when it does not say.

    It tells subscribers only, each first of all how things are.
    """
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    channel.subscribe(states.put)
    try:
        return states.get(timeout=_STATE_PATIENCE_S)
    except queue.Empty:
        return None
    finally:
        channel.unsubscribe(states.put)
