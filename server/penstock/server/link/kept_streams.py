"""The streams of requests that outlive their calls, kept by the engine that generates them.

Owns what has come of each, which front has it, and the bounds on all of them: in time, their grace
from when nobody reads one; in bytes and in number, the longest unread go first, and with them what
still runs. A stream is kept as the step news that made it, with what came between two events put
together: a front that gets it takes it in as it takes any other news. Holds outputs, and shows them
to nobody. Knows neither sockets nor the engine; times are seconds on the engine's clock.
"""

import operator
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

import numpy as np

from penstock.scheduler.batch import TokenLogprobs
from penstock.scheduler.events import (
    Admitted,
    Failed,
    Finished,
    Preempted,
    PrefixFound,
    Queued,
    StepEvents,
)
from penstock.scheduler.request import NO_TIME, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.link.resume_frames import KeptRequest, ResumeSpec

T = TypeVar("T")

NO_FRONT: Final = 0
_Change: TypeAlias = Queued | Admitted | Preempted | PrefixFound
_STREAM_BYTES: Final = 1024
_EVENT_BYTES: Final = 256
_TOKEN_BYTES: Final = 12
_LOGPROB_BYTES: Final = 8


class KeptStream:
    """One stream. `keys`: of its outputs, by index. `live`: of those that have not ended.

    `front_id`: who has it, NO_FRONT for nobody. `is_read`: somebody reads it there; otherwise it is
    kept until `expires_s`. `is_lost`: what came of it was too much to be kept.
    """

    __slots__ = (
        "_at_s",
        "_keys",
        "_num_top",
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
    )

    def __init__(self, kept: KeptRequest, front_id: int, specs: Iterable[RequestSpec]) -> None:
        specs = tuple(specs)
        self.name = kept.name
        self.resume_spec: ResumeSpec = kept.resume_spec
        self.keys = kept.keys
        self.live = {spec.key for spec in specs}
        self.front_id = front_id
        self.is_read = True
        self.expires_s = NO_TIME
        self.is_lost = self.has_failed = False
        self.num_bytes = _STREAM_BYTES + len(kept.resume_spec.message)
        self._num_top = max((spec.sampling.num_logprobs for spec in specs), default=-1)
        self._segments: list[StepEvents] = []
        self._step = 0
        self._at_s = 0.0
        self._keys = array("q")
        self._tokens = array("i")
        self._rows: list[TokenLogprobs] = []
        if kept.history is not None:
            history = kept.history.value()
            self._append(history, _EVENT_BYTES + len(history.tokens) * _TOKEN_BYTES)

    @property
    def has_come_to_something(self) -> bool:
        """Whether the engine has taken it: one that it refused has nothing to come back to."""
        return bool(self._tokens) or any(
            segment.changes or len(segment.tokens) for segment in self._segments
        )

    def add_token(self, events: StepEvents, key: int, token: int, row: int) -> None:
        """A token, the `row`th of a step's news."""
        if self.is_lost:
            return
        if not self._tokens:
            self._step, self._at_s = events.step, events.at_s
        self._keys.append(key)
        self._tokens.append(token)
        self.num_bytes += _TOKEN_BYTES
        if self._num_top >= 0 and events.logprobs is not None:
            self._rows.append(_row_of(events.logprobs, row, self._num_top))
            self.num_bytes += _LOGPROB_BYTES * (1 + self._num_top)

    def add_change(self, events: StepEvents, change: _Change) -> None:
        """What happened to an output besides tokens."""
        self._append(StepEvents(step=events.step, at_s=events.at_s, changes=(change,)))

    def add_prompt(self, events: StepEvents, entry: tuple[int, int, TokenLogprobs]) -> None:
        """What the engine says of the prompt."""
        size = _EVENT_BYTES + len(entry[2].chosen) * _LOGPROB_BYTES * (
            1 + entry[2].top_ids.shape[1]
        )
        news = StepEvents(step=events.step, at_s=events.at_s, prompt_logprobs=(entry,))
        self._append(news, size)

    def add_end(self, events: StepEvents, end: Finished | Failed) -> None:
        """An output has ended."""
        self.live.discard(end.key)
        self.has_failed = self.has_failed or isinstance(end, Failed)
        self._append(StepEvents(step=events.step, at_s=events.at_s, ends=(end,)))

    def history(self) -> tuple[StepEvents, ...]:
        """All that has come so far."""
        self._seal()
        return tuple(self._segments)

    def lose(self) -> None:
        """Forget what came: the request runs on, and its stream is to be had no more."""
        self.is_lost = True
        self._segments.clear()
        self._keys, self._tokens, self._rows = array("q"), array("i"), []
        self.resume_spec = replace(self.resume_spec, message=b"")
        self.num_bytes = 0  # no more than the request itself, of which there are only so many

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
                logprobs=_joined(self._rows) if self._rows else None,
            )
        )
        self._keys, self._tokens, self._rows = array("q"), array("i"), []


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLimits:
    """`max_bytes` of all streams; `max_unread`: streams that nobody reads."""

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
        # The longest unread first.
        self._unread: dict[KeptStream, None] = {}
        self._sizes: dict[KeptStream, int] = {}
        self.moved: dict[int, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._streams)

    def find(self, name: str) -> KeptStream | None:
        """The stream of this request."""
        return self._streams.get(name)

    def state_of(self, name: str) -> RequestState | None:
        """How a request ended whose stream is kept; None where none did."""
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
        """Nothing is kept of it from now on. Idempotent."""
        if self._streams.get(stream.name) is stream:
            del self._streams[stream.name]
        self.num_bytes -= self._sizes.pop(stream, 0)
        self._unread.pop(stream, None)
        for key in stream.live:
            self._by_key.pop(key, None)
            self.moved.pop(key, None)

    def move(self, stream: KeptStream, front_id: int) -> None:
        """`front_id` reads it from now on."""
        stream.front_id = front_id
        stream.is_read = True
        stream.expires_s = NO_TIME
        self._unread.pop(stream, None)
        self.moved.update(dict.fromkeys(stream.live, front_id))

    def detach(self, name: str, front_id: int) -> None:
        """Nobody reads it any more at this front, if that has it."""
        stream = self._streams.get(name)
        if stream is not None and stream.front_id == front_id and stream.is_read:
            self._park(stream)
            self._make_room()

    def front_gone(self, front_id: int) -> list[KeptStream]:
        """A front is gone; those that it had, which nobody has now."""
        lost = [stream for stream in self._streams.values() if stream.front_id == front_id]
        for stream in lost:
            stream.front_id = NO_FRONT
            self.moved.update(dict.fromkeys(stream.live, NO_FRONT))
            if stream.is_read:
                self._park(stream)
        self._make_room()
        return lost

    def record(self, events: StepEvents) -> None:
        """Keep what a step's news say of those that are kept."""
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
        """What of `news` is of a stream that is kept."""
        find = self._by_key.get
        for item in news:
            stream = find(key_of(item))
            if stream is not None:
                touched[stream] = None
                yield stream, item

    def sweep(self) -> None:
        """To be called about once a second: what nobody came for in time goes."""
        now_s = self._clock()
        for stream in [stream for stream in self._unread if stream.expires_s <= now_s]:
            self._drop(stream)

    def _ended(self, stream: KeptStream, key: int) -> None:
        del self._by_key[key]
        self.moved.pop(key, None)
        if stream.live:
            return
        if not stream.is_read:
            self._park(stream)

    def _park(self, stream: KeptStream) -> None:
        """Nobody reads it: its time runs from now on."""
        stream.is_read = False
        stream.expires_s = self._clock() + stream.resume_spec.grace_s
        self._unread.pop(stream, None)
        self._unread[stream] = None

    def _grew(self, stream: KeptStream) -> None:
        self.num_bytes += stream.num_bytes - self._sizes.get(stream, 0)
        self._sizes[stream] = stream.num_bytes
        self._make_room()
        if self.num_bytes > self._max_bytes and not stream.is_lost:
            # All of it belongs to streams that are read: this one cannot be had again.
            stream.lose()
            self._grew(stream)

    def _make_room(self) -> None:
        while self._unread and (
            self.num_bytes > self._max_bytes or len(self._unread) > self._max_unread
        ):
            self._drop(next(iter(self._unread)))

    def _drop(self, stream: KeptStream) -> None:
        self._on_drop(stream)
        self.forget(stream)


_key_of: Final = operator.attrgetter("key")
_first_of: Final = operator.itemgetter(0)


def _row_of(logprobs: TokenLogprobs, row: int, num_top: int) -> TokenLogprobs:
    rows = logprobs.take(slice(row, row + 1))
    return TokenLogprobs(
        # Copies: the step's matrices must not live as long as one row of them.
        chosen=rows.chosen.copy(),
        ranks=rows.ranks.copy(),
        top_ids=rows.top_ids[:, :num_top].copy(),
        top_logprobs=rows.top_logprobs[:, :num_top].copy(),
    )


def _joined(rows: list[TokenLogprobs]) -> TokenLogprobs:
    return TokenLogprobs(
        chosen=np.concatenate([row.chosen for row in rows]),
        ranks=np.concatenate([row.ranks for row in rows]),
        top_ids=np.concatenate([row.top_ids for row in rows]),
        top_logprobs=np.concatenate([row.top_logprobs for row in rows]),
    )
