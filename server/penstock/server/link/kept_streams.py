"""The streams of requests that outlive their calls, kept by the engine that generates them.

Owns which front has which, and the bounds on all of them: in time, their grace from when its reader
left; in bytes and in number, where the tenant that has most gives way: its longest unread go
first, and with them what still runs. Knows neither sockets nor the engine; times are seconds on the
engine's clock.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from penstock.scheduler.events import StepEvents
from penstock.scheduler.request import NO_TIME, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.link.kept_stream import NO_FRONT, KeptStream
from penstock.server.link.resume_frames import KeptRequest
from penstock.server.link.tenant_bytes import TenantBytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLimits:
    """`max_bytes` of all streams; `max_unread`: streams without a reader."""

    max_bytes: int = 64 * 1024 * 1024
    max_unread: int = 1024


DEFAULT_LIMITS: Final = KeptLimits()


class KeptStreams:
    """The kept streams of one engine.

    `clock`: the engine's. `on_drop` is called with each that goes. `moved`: which
    front has the live keys of those that are not with the front that submitted them.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        on_drop: Callable[[KeptStream], None],
        limits: KeptLimits = DEFAULT_LIMITS,
    ) -> None:
        self._clock = clock
        self._on_drop = on_drop
        self._max_bytes = limits.max_bytes
        self._max_unread = limits.max_unread
        self._streams: dict[str, KeptStream] = {}
        self._by_key: dict[int, KeptStream] = {}
        # By tenant; of each the longest unread first.
        self._unread: defaultdict[str, dict[KeptStream, None]] = defaultdict(dict)
        self._num_unread = 0
        self._sizes: defaultdict[str, dict[KeptStream, int]] = defaultdict(dict)
        self._bytes = TenantBytes()
        self.moved: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_bytes(self) -> int:
        """Of all streams."""
        return self._bytes.total

    def find(self, name: str) -> KeptStream | None:
        """The stream of this request."""
        return self._streams.get(name)

    def state_of(self, name: str) -> RequestState | None:
        """The final state of a request whose stream is kept; None if it has not ended."""
        stream = self._streams.get(name)
        if stream is None or stream.live:
            return None
        return RequestState.ERROR if stream.has_failed else RequestState.COMPLETED

    def begin(self, front_id: int, specs: tuple[RequestSpec, ...], kept: KeptRequest) -> None:
        """A request is about to be submitted, or has ended before; there is none of its name."""
        stream = KeptStream(kept, front_id, specs)
        self._streams[kept.name] = stream
        self._by_key.update((key, stream) for key in stream.live)
        if not kept.is_read:
            self._park(stream)
        self._grew(stream)

    def forget(self, stream: KeptStream) -> None:
        """Drop its stream. Idempotent."""
        if self._streams.get(stream.name) is stream:
            del self._streams[stream.name]
        self._bytes.add(stream.tenant, -self._sizes[stream.tenant].pop(stream, 0))
        if not self._sizes[stream.tenant]:
            del self._sizes[stream.tenant]
        self._unpark(stream)
        for key in stream.live:
            self._by_key.pop(key, None)
            self.moved.pop(key, None)

    def move(self, stream: KeptStream, front_id: int) -> None:
        """`front_id` reads it from now on."""
        stream.front_id = front_id
        stream.is_read = True
        stream.expires_s = NO_TIME
        self._unpark(stream)
        self.moved.update(dict.fromkeys(stream.live, front_id))

    def detach(self, name: str, front_id: int) -> None:
        """Record that no client reads it at this front any more."""
        stream = self._streams.get(name)
        if stream is not None and stream.front_id == front_id and stream.is_read:
            self._park(stream)
            self._make_room()

    def front_gone(self, front_id: int) -> list[KeptStream]:
        """A front has ended; returns its streams, which have no front now."""
        lost = [stream for stream in self._streams.values() if stream.front_id == front_id]
        for stream in lost:
            stream.front_id = NO_FRONT
            self.moved.update(dict.fromkeys(stream.live, NO_FRONT))
            if stream.is_read:
                self._park(stream)
        self._make_room()
        return lost

    def record(self, events: StepEvents) -> None:
        """Append a step's results to the kept streams."""
        if not self._by_key:
            return
        touched: dict[KeptStream, None] = {}
        for stream, change in self._of(events.changes, _key_of, touched):
            stream.add_change(events, change)
        for stream, entry in self._of(events.prompt_logprobs, _first_of, touched):
            stream.add_prompt(events, entry)
        rows = zip(
            events.keys.tolist(), events.tokens.tolist(), range(len(events.keys)), strict=True
        )
        for stream, (key, token, row) in self._of(rows, _first_of, touched):
            stream.add_token(events, key, token, row)
        for stream, end in self._of(events.ends, _key_of, touched):
            stream.add_end(events, end)
            self._ended(stream, end.key)
        for stream in touched:
            if self._streams.get(stream.name) is not stream:
                continue  # it made room for another
            if stream.has_failed and not stream.live and not stream.has_come_to_something:
                self.forget(stream)
            else:
                self._grew(stream)

    def _of(
        self, news: Iterable[T], key_of: Callable[[T], int], touched: dict[KeptStream, None]
    ) -> Iterator[tuple[KeptStream, T]]:
        """The part of `news` that belongs to a kept stream."""
        find = self._by_key.get
        for item in news:
            stream = find(key_of(item))
            if stream is not None:
                touched[stream] = None
                yield stream, item

    def sweep(self) -> None:
        """To be called about once a second: drops streams whose time to be resumed is over."""
        now_s = self._clock()
        unread = [stream for streams in self._unread.values() for stream in streams]
        for stream in unread:
            if stream.expires_s <= now_s:
                self._drop(stream)

    def _ended(self, stream: KeptStream, key: int) -> None:
        del self._by_key[key]
        self.moved.pop(key, None)
        if stream.live:
            return
        if not stream.is_read:
            self._park(stream)

    def _park(self, stream: KeptStream) -> None:
        """Record that it has no reader: its resume timeout starts now."""
        stream.is_read = False
        stream.expires_s = self._clock() + stream.resume_spec.grace_s
        self._unpark(stream)
        self._unread[stream.tenant][stream] = None
        self._num_unread += 1

    def _unpark(self, stream: KeptStream) -> None:
        unread = self._unread.get(stream.tenant, {})
        if stream in unread:
            del unread[stream]
            self._num_unread -= 1
            if not unread:
                del self._unread[stream.tenant]

    def _grew(self, stream: KeptStream) -> None:
        self._count(stream)
        self._make_room()

    def _count(self, stream: KeptStream) -> None:
        sizes = self._sizes[stream.tenant]
        self._bytes.add(stream.tenant, stream.num_bytes - sizes.get(stream, 0))
        sizes[stream] = stream.num_bytes

    def _make_room(self) -> None:
        unread = self._unread
        while self._num_unread > self._max_unread:
            tenant = max(unread, key=lambda tenant: len(unread[tenant]))
            self._drop(next(iter(unread[tenant])))
        while self.num_bytes > self._max_bytes:
            tenant = self._bytes.largest
            if tenant in unread:
                self._drop(next(iter(unread[tenant])))
                continue
            # All that it has is read: its longest cannot be had again.
            sizes = self._sizes[tenant]
            stream = max(sizes, key=sizes.__getitem__)
            stream.lose()
            self._count(stream)

    def _drop(self, stream: KeptStream) -> None:
        self._on_drop(stream)
        self.forget(stream)


_key_of: Final = operator.attrgetter("key")
_first_of: Final = operator.itemgetter(0)
