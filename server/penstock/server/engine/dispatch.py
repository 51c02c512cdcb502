"""Dispatches the frames that fronts (gRPC server processes) and observers send to the engine.

Records which front has which live requests, so that it can cancel the requests of a front that
disconnects. Uses no sockets and no threads: `front_connections.py` transports the frames.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from penstock.scheduler.cache_index import CacheIndex
from penstock.scheduler.engine import Engine
from penstock.scheduler.events import Failed, Queued, StepEvents
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.engine.kept_streams import (
    NO_FRONT,
    KeptLimits,
    KeptStream,
    KeptStreams,
)
from penstock.server.engine.quarantine import Quarantine
from penstock.server.ipc.cache_feeds import CacheFeeds
from penstock.server.ipc.frames import (
    Attach,
    Attached,
    AttachFailure,
    Cancel,
    CancelAnswer,
    CancelById,
    CarryOut,
    Command,
    CommandResult,
    Detach,
    EngineHello,
    Follow,
    Frame,
    KeptRequest,
    Submit,
    Unfollow,
    ViewAnswer,
    ViewQuery,
    encode,
)
from penstock.server.ipc.step_frames import FRONT_SHIFT, StepFrame, split_by_front
from penstock.server.ipc.wire import FrameError

logger = logging.getLogger(__name__)

_MAX_CANCELS = 64
"""Maximum number of outputs cancelled at a time. One cancellation takes about 20 us, so a thousand
at once would delay all other streams."""
_RECONNECT_S = 5.0
"""Time after an engine restart in which fronts resubmit their requests, in seconds. Until then, an
unknown stream may still be resubmitted."""


class Dispatcher:
    """Translates frames from fronts into engine calls, and engine events into frames for fronts.

    Each output of a request has a key. The upper bits of the key are the id of the front that
    submitted the request. `hello` is the first frame that each connecting process receives.
    `kept_limits` has the limits of the streams kept for Resume. `execute` executes an observer's
    command; without it commands are rejected. `quarantine` holds or rejects requests that may have
    crashed an earlier engine. `mark_submitting` is called with the key of the first output of a
    request before the request is submitted, and with 0 afterwards. `clock` is the engine's clock.
    `cache_index` is the index of the blocks in the prefix cache; without it fronts cannot subscribe
    to changes of the cache.
    """

    def __init__(
        self,
        engine: Engine,
        hello: EngineHello,
        *,
        kept_limits: KeptLimits,
        execute: CarryOut | None = None,
        quarantine: Quarantine | None = None,
        mark_submitting: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        cache_index: CacheIndex | None = None,
    ) -> None:
        self.engine = engine
        self.newest_queue_s: float | None = None
        """Estimated queue time of the most recently queued request, in seconds; None if unknown."""
        self.num_output_tokens = 0
        """Number of tokens generated since the start of the engine."""
        self.kept = KeptStreams(clock, on_drop=self._drop, limits=kept_limits)
        self._clock = clock
        self._reconnected_at_s = clock() + _RECONNECT_S if hello.epoch > 1 else clock()
        self._cache_feeds = CacheFeeds(cache_index)
        self._outgoing: list[tuple[int, bytes]] = []
        self._quarantine = quarantine or Quarantine((), lambda _: None)
        self._mark_submitting = mark_submitting
        self.hello_frame = encode(hello)
        self._execute = execute
        # By front id. NO_FRONT holds the keys of kept streams that have no front.
        self._live_keys: dict[int, set[int]] = {NO_FRONT: set()}
        self._to_cancel: deque[tuple[int, FinishReason]] = deque()

    @property
    def num_live(self) -> int:
        """Number of outputs that have not ended, including the outputs of kept streams without a
        front."""
        return sum(map(len, self._live_keys.values()))

    @property
    def has_pending_work(self) -> bool:
        """True if `step` has something to do even if the engine is idle: cancellations, a held
        request to submit on probation, ends of requests in quarantine to report, parts of cache
        snapshots, or frames to send."""
        return (
            bool(self._to_cancel or self._outgoing)
            or self._quarantine.has_work
            or self._cache_feeds.has_work
        )

    def front_connected(self, front_id: int) -> bytes:
        """Register a front and return the response to its first frame, `FrontHello`. Executes all
        pending cancellations first."""
        if self._to_cancel:
            # A front that reconnects may reuse its keys.
            self._cancel_first(len(self._to_cancel))
        self._live_keys[front_id] = set()
        return self.hello_frame

    def front_disconnected(self, front_id: int) -> None:
        """Cancel the requests of a disconnected front, except requests that another front can
        resume."""
        keys = self._live_keys.pop(front_id, set())
        kept = self.kept.front_disconnected(front_id)
        orphaned = self._live_keys[NO_FRONT]
        for stream in kept:
            # Otherwise its stream was dropped because the limits were exceeded.
            if self.kept.find(stream.name) is stream:
                orphaned |= stream.live
        keys -= orphaned
        self._cache_feeds.front_disconnected(front_id)
        self._quarantine.front_disconnected(front_id, orphaned)
        if kept:
            others = f", stopped outputs: {len(keys)}" if keys else ""
            logger.info("front %d is lost, resumable requests: %d%s", front_id, len(kept), others)
        elif keys:
            logger.info("front %d is lost, cancelled requests: %d", front_id, len(keys))
        if keys:
            self._cancel_soon(keys, FinishReason.CANCELLED)

    def handle_frame(self, front_id: int, frame: Frame) -> bytes | None:
        """Handle one frame from a front and return the response frame, if any.

        Raises FrameError if the front violates the protocol; the caller must then close the
        connection.
        """
        match frame:
            case Submit(specs=specs, kept=kept):
                self._submit(front_id, specs, kept)
            case Cancel(keys=keys, reason=reason):
                self._cancel_soon(self._live_keys[front_id].intersection(keys.tolist()), reason)
            case CancelById(ticket=ticket, request_id=request_id):
                state = self._cancel_by_id(request_id) or self.kept.state_of(request_id)
                return encode(CancelAnswer(ticket=ticket, state=state))
            case Attach() as attach:
                return encode(self._attach(front_id, attach))
            case Detach(names=names):
                for name in names:
                    self.kept.detach(name, front_id)
            case Follow() as request:
                self._cache_feeds.follow(front_id, request)
            case Unfollow(ticket=ticket):
                self._cache_feeds.unfollow(front_id, ticket)
            case other:
                raise FrameError(f"unexpected frame from a front: {type(other).__name__}")
        return None

    def handle_observer_frame(self, frame: Frame, answer: Callable[[bytes], None]) -> None:
        """Handle one frame from an observer.

        The response is passed to `answer`, possibly later and from another thread. Raises
        FrameError if the observer violates the protocol.
        """
        match frame:
            case ViewQuery(ticket=ticket):
                answer(encode(ViewAnswer(ticket=ticket, views=self.engine.output_views())))
            case Command() as command if self._execute is not None:
                self._execute(command, lambda done: answer(encode(done)))
            case Command(ticket=ticket):
                answer(
                    encode(CommandResult(ticket=ticket, problem="this engine accepts no commands"))
                )
            case other:
                raise FrameError(f"unexpected frame from an observer: {type(other).__name__}")

    def step(self) -> list[tuple[int, bytes]]:
        """Execute pending cancellations, submit the next request on probation, and run one engine
        step. Return the frames to send, each with the id of its front."""
        if self._to_cancel:
            self._cancel_first(_MAX_CANCELS)
        quarantine = self._quarantine
        if quarantine.has_work:
            self._submit_to_engine(quarantine.next_probation())
        events = quarantine.with_ends(self.engine.step())
        frames, self._outgoing = self._outgoing, []
        for front_id, update in self._cache_feeds.take():
            frames.append((front_id, encode(update)))
        if events.is_empty:
            return frames
        self.num_output_tokens += len(events.keys)
        self._note(events)
        parts = split_by_front(events, self.kept.moved)
        self.kept.record(events)
        for front_id, part in parts:
            live = self._live_keys.get(front_id)
            if live is None:
                continue
            for end in part.ends:
                live.discard(end.key)
            if front_id != NO_FRONT:
                frames.append((front_id, encode(part)))
        return frames

    def _note(self, events: StepEvents) -> None:
        """Store the latest estimate of the queue time, and log the failures that have a detail."""
        for change in events.changes:
            if isinstance(change, Queued):
                self.newest_queue_s = change.estimated_queue_s
        for end in events.ends:
            if isinstance(end, Failed) and end.detail:
                # The client receives only the reason; the detail is logged.
                logger.warning(
                    "a request failed in its step: %s",
                    end.detail,
                    extra={
                        "request_id": end.request_id,
                        "trace_id": end.trace_id.hex(),
                        "step": events.step,
                    },
                )

    def sweep(self) -> None:
        """Drop streams whose resume timeout has expired. Call this about once per second."""
        self.kept.sweep()

    def _attach(self, front_id: int, attach: Attach) -> Attached:
        """Attach a stream to front `front_id`, so that this front receives its events from now on.
        Return the history of the stream, or a failure if the stream cannot be attached."""
        stream = self.kept.find(attach.name)
        if stream is None or stream.is_lost:
            failure = AttachFailure.NOT_FOUND if stream is None else AttachFailure.LOST
            if stream is None and self._clock() < self._reconnected_at_s:
                failure = AttachFailure.NOT_SETTLED
            return Attached(ticket=attach.ticket, resume_spec=None, failure=failure)
        if stream.front_id not in (NO_FRONT, front_id):
            self._detach(stream)
        # A pending detach notice would arrive after the response and end the new stream.
        stale = (front_id, _detach_frame(stream))
        self._outgoing = [sent for sent in self._outgoing if sent != stale]
        self._live_keys[stream.front_id] -= stream.live
        self._live_keys[front_id] |= stream.live
        self.kept.move(stream, front_id)
        return Attached(
            ticket=attach.ticket,
            resume_spec=stream.resume_spec,
            keys=stream.keys,
            history=tuple(map(StepFrame.from_events, stream.history())),
        )

    def _detach(self, stream: KeptStream) -> None:
        """Queue a notice that the stream is detached, for the front that has the stream. The next
        step sends it."""
        self._outgoing.append((stream.front_id, _detach_frame(stream)))

    def _drop(self, stream: KeptStream) -> None:
        """Cancel the running outputs of a dropped stream, because no front can attach to it any
        more. Notify its front, if it has one."""
        if stream.front_id != NO_FRONT:
            self._detach(stream)
        self._live_keys[stream.front_id] -= stream.live
        self._cancel_soon(tuple(stream.live), FinishReason.CANCELLED)

    def _drop_superseded(self, front_id: int, stream: KeptStream, *, is_read: bool) -> bool:
        """Drop `stream`, the older stream of a resubmitted request, and return True. If another
        front has `stream` and the request must stay there, drop nothing and return False.

        `is_read` is True if a client reads the request at the submitting front. The request stays
        at the other front if a client reads it there, or if `is_read` is False.
        """
        is_others = stream.front_id not in (NO_FRONT, front_id)
        if is_others and (stream.is_read or not is_read):
            return False
        self._drop(stream)
        self._cancel_first(len(self._to_cancel))
        self.kept.remove(stream)
        return True

    def _cancel_by_id(self, request_id: str) -> RequestState | None:
        state = self._quarantine.cancel_by_id(request_id)
        return self.engine.cancel_by_id(request_id) if state is None else state

    def _cancel_soon(self, keys: Iterable[int], reason: FinishReason) -> None:
        """Queue outputs for cancellation. If the queue was empty, the first `_MAX_CANCELS` are
        cancelled now; the others are cancelled before the next steps."""
        is_first = not self._to_cancel
        self._to_cancel.extend((key, reason) for key in keys)
        if is_first:
            self._cancel_first(_MAX_CANCELS)

    def _cancel_first(self, max_keys: int) -> None:
        for _ in range(min(max_keys, len(self._to_cancel))):
            # Cancelling an output that has ended meanwhile has no effect.
            key, reason = self._to_cancel.popleft()
            if not self._quarantine.cancel(key, reason):
                self.engine.cancel(key, reason)

    def _submit(
        self, front_id: int, specs: tuple[RequestSpec, ...], kept: KeptRequest | None
    ) -> None:
        live = self._live_keys[front_id]
        keys = [spec.key for spec in specs]
        for key in keys:
            if key >> FRONT_SHIFT != front_id:
                raise FrameError(f"key {key} does not belong to front {front_id}")
        if not live.isdisjoint(keys) or len(set(keys)) != len(keys):
            raise FrameError("a key is used twice")
        if not self._release_previous(front_id, specs, kept):
            return
        if kept is not None and self.kept.find(kept.name) is None:
            self.kept.begin(front_id, specs, kept)
            if self.kept.find(kept.name) is None:
                # It was dropped because the limits were exceeded while it had no reader; its front
                # was notified.
                return
        live.update(keys)
        if specs and not self._quarantine.intercept(front_id, specs):
            self._submit_to_engine(specs)

    def _release_previous(
        self, front_id: int, specs: tuple[RequestSpec, ...], kept: KeptRequest | None
    ) -> bool:
        """Release the previous stream of the submitted request. If the stream stays at another
        front, notify the submitting front and return False.

        If `kept` is None, the request cannot be resumed. It may still have a previous stream, if
        its front lost only the connection to this engine.
        """
        if kept is not None:
            name, keys, is_read = kept.name, kept.keys, kept.is_read
        elif specs:
            name, keys, is_read = specs[0].request_id, tuple(spec.key for spec in specs), True
        else:
            return True
        stream = self.kept.find(name)
        is_new = bool(specs) and not specs[0].num_replays
        if stream is None or (kept is None and (is_new or not stream.live)):
            return True
        if is_new:
            if not stream.live:
                self._drop(stream)
                self.kept.remove(stream)
            return True
        if self._drop_superseded(front_id, stream, is_read=is_read):
            return True
        self._outgoing.append((front_id, encode(Detach(names=(name,), keys=keys))))
        return False

    def _submit_to_engine(self, specs: tuple[RequestSpec, ...]) -> None:
        if not specs:
            return
        if self._mark_submitting is None:
            self.engine.submit(specs)
            return
        # If this raises, the engine process ends while the status board still lists the request.
        self._mark_submitting(specs[0].key)
        self.engine.submit(specs)
        self._mark_submitting(0)


def _detach_frame(stream: KeptStream) -> bytes:
    return encode(Detach(names=(stream.name,), keys=stream.keys))
