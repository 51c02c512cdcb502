"""Keeps the streams of resumable requests in the engine, so that a client can reconnect to them.

Records which front (gRPC server process) has which stream. Limits the total size of all streams and
the number of streams without a reader. A stream without a reader is kept until its resume timeout
expires.

When a limit is exceeded, streams without a reader are dropped, and their requests are cancelled if
they still run. If there are too many, they are dropped from the tenant with the most of them; if
the total size is too large, from the tenant with the most bytes. The stream that has been without a
reader for the longest time is dropped first. If the tenant with the most bytes has no stream
without a reader, the events of its largest stream are dropped. A stream must fit into one frame,
because a front receives it in one frame when it attaches.

A stream is stored as the events of its steps, with consecutive tokens merged; a front that attaches
it processes them like other events. Uses no sockets and does not call the engine; times are seconds
on the engine's clock.
"""

import operator
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

import numpy as np

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.events import (
    Admitted,
    Completed,
    Failed,
    Preempted,
    PrefixFound,
    Queued,
    StepEvents,
)
from penstock.scheduler.request import NO_TIME, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.ipc.frames import KEPT_TOKEN_BYTES, KeptRequest, ResumeSpec
from penstock.server.ipc.wire import MAX_FRAME_BYTES
from penstock.server.tenants import TenantBytes

T = TypeVar("T")


NO_FRONT: Final = 0
_Change: TypeAlias = Queued | Admitted | Preempted | PrefixFound
# Measured sizes, Python objects included.
_STREAM_BYTES: Final = 1280
_OUTPUT_BYTES: Final = 128
_EVENT_BYTES: Final = 512
_LOGPROBS_BYTES: Final = 512
"""Bytes of one `TokenLogprobs` without its rows."""
_LOGPROB_BYTES: Final = 8
_FRAME_MARGIN_BYTES: Final = 8 << 20
"""Margin for what an encoded stream contains beyond the sizes above."""
_key_of: Final = operator.attrgetter("key")
_first_of: Final = operator.itemgetter(0)


class KeptStream:
    """The stream of one request, kept so that its client can resume it.

    Attributes:
        name: The engine's id of the request.
        num_bytes: The estimated memory that the stream uses, in bytes.
        keys: Keys of its outputs, by output index.
        live: Keys of the outputs that have not ended.
        front_id: The front that has the stream, or NO_FRONT.
        is_read: True if a client reads the stream at that front; otherwise the stream is kept until
            `expires_s`.
        is_lost: True if its events were dropped because they exceeded a limit.
    """

    __slots__ = (
        "_at_s",
        "_keys",
        "_rows",
        "_segments",
        "_step",
        "_tokens",
        "expires_s",
        "front_id",
        "has_failed",
        "is_lost",
        "is_read",
        "keys",
        "live",
        "name",
        "num_bytes",
        "resume_spec",
        "tenant",
    )

    def __init__(self, kept: KeptRequest, front_id: int, specs: Iterable[RequestSpec]) -> None:
        specs = tuple(specs)
        self.name = kept.name
        self.tenant = kept.tenant
        self.resume_spec: ResumeSpec = kept.resume_spec
        self.keys = kept.keys
        self.live = {spec.key for spec in specs}
        self.front_id = front_id
        self.is_read = True
        self.expires_s = NO_TIME
        self.is_lost = self.has_failed = False
        self.num_bytes = (
            _STREAM_BYTES + len(kept.keys) * _OUTPUT_BYTES + len(kept.resume_spec.message)
        )
        num_top = max((spec.sampling.num_logprobs for spec in specs), default=-1)
        self._segments: list[StepEvents] = []
        self._step = 0
        self._at_s = 0.0
        self._keys = array("q")
        self._tokens = array("i")
        self._rows = None if num_top < 0 else _KeptLogprobs(num_top)
        if kept.history is not None:
            history = kept.history.value()
            self._append(history, _EVENT_BYTES + len(history.tokens) * KEPT_TOKEN_BYTES)

    @property
    def was_accepted(self) -> bool:
        """True if the engine accepted the request. A rejected request cannot be resumed."""
        return bool(self._tokens) or any(
            segment.changes or len(segment.tokens) for segment in self._segments
        )

    def add_token(self, events: StepEvents, key: int, token: int, row: int) -> None:
        """Add one generated token of output `key`. `row` is its index in the tokens of `events`."""
        if self.is_lost:
            return
        if not self._tokens:
            self._step, self._at_s = events.step, events.at_s
            self.num_bytes += _EVENT_BYTES + (0 if self._rows is None else _LOGPROBS_BYTES)
        self._keys.append(key)
        self._tokens.append(token)
        self.num_bytes += KEPT_TOKEN_BYTES
        if self._rows is not None and events.logprobs is not None:
            self._rows.append(events.logprobs, row)
            self.num_bytes += _LOGPROB_BYTES * (1 + self._rows.num_top)

    def add_change(self, events: StepEvents, change: _Change) -> None:
        """Add a state change of one output."""
        self._append(StepEvents(step=events.step, at_s=events.at_s, changes=(change,)))

    def add_prompt(self, events: StepEvents, entry: tuple[int, int, TokenLogprobs]) -> None:
        """Add the log probabilities of a prompt, an entry of `StepEvents.prompt_logprobs`."""
        rows = entry[2]
        num_values = len(rows.chosen) * (1 + rows.top_ids.shape[1])
        size = _EVENT_BYTES + _LOGPROBS_BYTES + num_values * _LOGPROB_BYTES
        added = StepEvents(step=events.step, at_s=events.at_s, prompt_logprobs=(entry,))
        self._append(added, size)

    def add_end(self, events: StepEvents, end: Completed | Failed) -> None:
        """Add the end of one output."""
        self.live.discard(end.key)
        self.has_failed = self.has_failed or isinstance(end, Failed)
        self._append(StepEvents(step=events.step, at_s=events.at_s, ends=(end,)))

    def history(self) -> tuple[StepEvents, ...]:
        """Return all events so far; none if they were dropped."""
        self._seal()
        return tuple(self._segments)

    def drop_events(self) -> None:
        """Drop all events. The request continues, but its stream can no longer be resumed."""
        self.is_lost = True
        self._segments.clear()
        self._keys, self._tokens, self._rows = array("q"), array("i"), None
        self.resume_spec = replace(self.resume_spec, message=b"")
        # Only the request remains in memory, and the number of requests is limited.
        self.num_bytes = 0

    def _append(self, events: StepEvents, num_bytes: int = _EVENT_BYTES) -> None:
        if not self.is_lost:
            self._seal()
            self._segments.append(events)
            self.num_bytes += num_bytes

    def _seal(self) -> None:
        if not self._tokens:
            return
        self._segments.append(
            StepEvents(
                step=self._step,
                at_s=self._at_s,
                keys=np.array(self._keys, dtype=np.int64),
                tokens=np.array(self._tokens, dtype=np.int32),
                logprobs=None if self._rows is None else self._rows.take(),
            )
        )
        self._keys, self._tokens = array("q"), array("i")


class _KeptLogprobs:
    """Log probabilities of the tokens of one stream, and of the `num_top` most likely tokens at
    each position.

    Each field is one array over all rows, because one array per row would take much more memory.
    """

    __slots__ = ("_chosen", "_ranks", "_top_ids", "_top_logprobs", "num_top")

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._clear()

    def append(self, logprobs: TokenLogprobs, row: int) -> None:
        """Append row `row` of a step, with its `num_top` most likely tokens."""
        top = slice(self.num_top)
        self._chosen.append(logprobs.chosen[row])
        self._ranks.append(logprobs.ranks[row])
        self._top_ids.extend(logprobs.top_ids[row, top].tolist())
        self._top_logprobs.extend(logprobs.top_logprobs[row, top].tolist())

    def take(self) -> TokenLogprobs | None:
        """Remove and return all rows; return None if there are none."""
        num_rows = len(self._chosen)
        if not num_rows:
            return None
        shape = (num_rows, len(self._top_ids) // num_rows)
        rows = TokenLogprobs(
            chosen=np.array(self._chosen, dtype=np.float32),
            ranks=np.array(self._ranks, dtype=np.int32),
            top_ids=np.array(self._top_ids, dtype=np.int32).reshape(shape),
            top_logprobs=np.array(self._top_logprobs, dtype=np.float32).reshape(shape),
        )
        self._clear()
        return rows

    def _clear(self) -> None:
        self._chosen, self._top_logprobs = array("f"), array("f")
        self._ranks, self._top_ids = array("i"), array("i")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLimits:
    """Limits of all kept streams: `max_bytes` is the limit of their total size, `max_unread` the
    limit of the number of streams without a reader."""

    max_bytes: int
    max_unread: int


class KeptStreams:
    """Stores the streams of one engine's resumable requests. Drops streams when a limit is exceeded
    or their resume timeout has expired.

    `clock` is the engine's clock. `on_drop` is called with each dropped stream. `moved` maps live
    keys to the front that receives their events, if that is not the front that submitted them.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        on_drop: Callable[[KeptStream], None],
        limits: KeptLimits,
    ) -> None:
        self._clock = clock
        self._on_drop = on_drop
        self._max_bytes = limits.max_bytes
        self._max_unread = limits.max_unread
        self._streams: dict[str, KeptStream] = {}
        self._by_key: dict[int, KeptStream] = {}
        # By tenant; the stream without a reader for the longest time comes first.
        self._unread: defaultdict[str, dict[KeptStream, None]] = defaultdict(dict)
        self._num_unread = 0
        self._sizes: defaultdict[str, dict[KeptStream, int]] = defaultdict(dict)
        self._bytes = TenantBytes()
        self.moved: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_bytes(self) -> int:
        """Total size of all streams, in bytes."""
        return self._bytes.total

    def find(self, name: str) -> KeptStream | None:
        """Return the stream of the request with the engine's id `name`, or None if it is not
        kept."""
        return self._streams.get(name)

    def state_of(self, name: str) -> RequestState | None:
        """Return the final state of a request, or None if it is not kept or has not ended."""
        stream = self._streams.get(name)
        if stream is None or stream.live:
            return None
        return RequestState.ERROR if stream.has_failed else RequestState.COMPLETED

    def begin(self, front_id: int, specs: tuple[RequestSpec, ...], kept: KeptRequest) -> None:
        """Create the stream of a request that is about to be submitted or has already ended.

        Its name must be unused. If a limit is then exceeded, streams are dropped immediately,
        possibly also the new one.
        """
        stream = KeptStream(kept, front_id, specs)
        self._streams[kept.name] = stream
        self._by_key.update((key, stream) for key in stream.live)
        if not kept.is_read:
            self._mark_unread(stream)
        self._grew(stream)

    def remove(self, stream: KeptStream) -> None:
        """Remove the stream. Does nothing if it was removed already."""
        if self._streams.get(stream.name) is stream:
            del self._streams[stream.name]
        self._bytes.add(stream.tenant, -self._sizes[stream.tenant].pop(stream, 0))
        if not self._sizes[stream.tenant]:
            del self._sizes[stream.tenant]
        self._unmark_unread(stream)
        for key in stream.live:
            self._by_key.pop(key, None)
            self.moved.pop(key, None)

    def move(self, stream: KeptStream, front_id: int) -> None:
        """Record that this front reads the stream from now on."""
        stream.front_id = front_id
        stream.is_read = True
        stream.expires_s = NO_TIME
        self._unmark_unread(stream)
        self.moved.update(dict.fromkeys(stream.live, front_id))

    def detach(self, name: str, front_id: int) -> None:
        """Record that no client reads the stream at this front any more. Does nothing if the stream
        is not at this front."""
        stream = self._streams.get(name)
        if stream is not None and stream.front_id == front_id and stream.is_read:
            self._mark_unread(stream)
            self._enforce_limits()

    def front_disconnected(self, front_id: int) -> list[KeptStream]:
        """Detach the streams of a disconnected front, and enforce the limits. Return the detached
        streams, including streams that were then dropped because of the limits."""
        lost = [stream for stream in self._streams.values() if stream.front_id == front_id]
        for stream in lost:
            stream.front_id = NO_FRONT
            self.moved.update(dict.fromkeys(stream.live, NO_FRONT))
            if stream.is_read:
                self._mark_unread(stream)
        self._enforce_limits()
        return lost

    def record(self, events: StepEvents) -> None:
        """Append the results of a step to the kept streams. Removes the stream of a request that
        was rejected."""
        if not self._by_key:
            return
        touched: dict[KeptStream, None] = {}
        for stream, change in self._with_streams(events.changes, _key_of, touched):
            stream.add_change(events, change)
        for stream, entry in self._with_streams(events.prompt_logprobs, _first_of, touched):
            stream.add_prompt(events, entry)
        rows = zip(
            events.keys.tolist(), events.tokens.tolist(), range(len(events.keys)), strict=True
        )
        for stream, (key, token, row) in self._with_streams(rows, _first_of, touched):
            stream.add_token(events, key, token, row)
        for stream, end in self._with_streams(events.ends, _key_of, touched):
            stream.add_end(events, end)
            self._ended(stream, end.key)
        for stream in touched:
            if self._streams.get(stream.name) is not stream:
                continue  # It was dropped because another stream exceeded the limits.
            if stream.has_failed and not stream.live and not stream.was_accepted:
                self.remove(stream)
            else:
                self._grew(stream)

    def _with_streams(
        self, items: Iterable[T], key_of: Callable[[T], int], touched: dict[KeptStream, None]
    ) -> Iterator[tuple[KeptStream, T]]:
        """Yield the items that belong to kept streams, each with its stream, and add these streams
        to `touched`. `key_of` returns the output key of an item."""
        find = self._by_key.get
        for item in items:
            stream = find(key_of(item))
            if stream is not None:
                touched[stream] = None
                yield stream, item

    def sweep(self) -> None:
        """Drop streams whose resume timeout has expired. Call this about once per second."""
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
            self._mark_unread(stream)

    def _mark_unread(self, stream: KeptStream) -> None:
        """Record that the stream has no reader. Its resume timeout starts now."""
        stream.is_read = False
        stream.expires_s = self._clock() + stream.resume_spec.resume_timeout_s
        self._unmark_unread(stream)
        self._unread[stream.tenant][stream] = None
        self._num_unread += 1

    def _unmark_unread(self, stream: KeptStream) -> None:
        unread = self._unread.get(stream.tenant, {})
        if stream in unread:
            del unread[stream]
            self._num_unread -= 1
            if not unread:
                del self._unread[stream.tenant]

    def _grew(self, stream: KeptStream) -> None:
        if stream.num_bytes > MAX_FRAME_BYTES - _FRAME_MARGIN_BYTES:
            stream.drop_events()
        self._count(stream)
        self._enforce_limits()

    def _count(self, stream: KeptStream) -> None:
        sizes = self._sizes[stream.tenant]
        self._bytes.add(stream.tenant, stream.num_bytes - sizes.get(stream, 0))
        sizes[stream] = stream.num_bytes

    def _enforce_limits(self) -> None:
        unread = self._unread
        while self._num_unread > self._max_unread:
            tenant = max(unread, key=lambda tenant: len(unread[tenant]))
            self._drop(next(iter(unread[tenant])))
        while self.num_bytes > self._max_bytes:
            tenant = self._bytes.largest
            if tenant in unread:
                self._drop(next(iter(unread[tenant])))
                continue
            # All streams of the tenant have readers, so the events of its largest stream are
            # dropped.
            sizes = self._sizes[tenant]
            stream = max(sizes, key=sizes.__getitem__)
            stream.drop_events()
            self._count(stream)

    def _drop(self, stream: KeptStream) -> None:
        self._on_drop(stream)
        self.remove(stream)
