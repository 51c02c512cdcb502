"""What an engine does with the frames of its fronts, whatever carries them.

Owns which front has which live requests, so that a front that goes takes its requests along. Does
not know sockets or threads.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.cache_book import CacheBook
from penstock.scheduler.events import Failed, Finished, Queued, StepEvents
from penstock.scheduler.executor import Feature
from penstock.scheduler.live_view import LiveView
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.link.cache_feeds import CacheFeeds
from penstock.server.link.cache_frames import Follow, Unfollow
from penstock.server.link.frames import Cancel, CancelAnswer, CancelById, Frame, encode
from penstock.server.link.hand_over import HandOvers, Mail
from penstock.server.link.look_frames import Look, LookAnswer, Order, OrderAnswer
from penstock.server.link.orphanage import Orphanage
from penstock.server.link.ports import EngineHello
from penstock.server.link.quarantine import Quarantine
from penstock.server.link.resume_frames import Claim, Give, Gone, Keep, Settle
from penstock.server.link.spec_frames import Submit
from penstock.server.link.step_frames import FRONT_SHIFT, split_by_front
from penstock.server.link.wire import LinkError

log = logging.getLogger(__name__)

_MAX_CANCELS = 64
"""Requests that are cancelled between two steps, some 20 us each: a thousand at once would hold up
every other stream."""


_OWN_ENDS = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class EngineCore(Protocol):
    """What the link needs of `penstock.scheduler.engine.Engine`. One thread calls it."""

    def submit(self, specs: tuple[RequestSpec, ...]) -> None:
        """Queue the outputs of one request; refusals come as events."""
        ...

    def cancel(self, key: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End one request; False when it is not live."""
        ...

    def cancel_by_id(self, request_id: str) -> RequestState | None:
        """End all outputs of a request; where it stood, None when none is live."""
        ...

    def step(self) -> StepEvents:
        """Do one step and return its news."""
        ...

    @property
    def has_work(self) -> bool:
        """True when a step would do or tell something."""
        ...

    @property
    def ready_fd(self) -> int | None:
        """None: a step is due while there is work. Else also readable when one is due."""
        ...

    def next_wakeup_s(self) -> float:
        """When, on the engine's clock, time ends a request."""
        ...

    def output_tokens(self, key: int) -> NDArray[np.int32] | None:
        """What a live output has generated so far; None when it is not live."""
        ...

    def check_next_piece(self) -> bool:
        """Check a part of the accounts; True when it was the last. Raises when they are wrong."""
        ...

    def look(self) -> tuple[LiveView, ...]:
        """Every output that has not ended; for people, so not for every step."""
        ...


CarryOut = Callable[[Order, Callable[[OrderAnswer], None]], None]
"""Begins to do what an order says and gives the answer to the callable, now or from another thread.
Does not block."""


class Dispatcher:
    """Turns fronts' frames into engine calls and engine events into fronts' frames.

    `carry_out`: whoever does what an observer orders; None: nobody, and observers are told so.
    `quarantine`: what becomes of requests that may have killed an engine before. `show_door` is
    told whose outputs are being taken in, by the first one's key, and 0 when they are. `clock`: the
    engine's. `num_fronts`: as long as fewer are here, one that is not may have any request.
    `cache_book`: what is cached in the engine, None where fronts may not follow that.
    """

    def __init__(
        self,
        engine: EngineCore,
        hello: EngineHello,
        *,
        carry_out: CarryOut | None = None,
        quarantine: Quarantine | None = None,
        show_door: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        num_fronts: int = 0,
        cache_book: CacheBook | None = None,
    ) -> None:
        self.engine = engine
        self.newest_queue_s: float | None = None
        """How long the request that was queued last will probably wait, seconds."""
        self.num_output_tokens = 0
        """Of all requests, so far."""
        can_repeat = Feature.SEED in hello.executor.features
        orphanage = Orphanage(clock, can_repeat=can_repeat)
        self._orphanage = orphanage
        self._hand_overs = HandOvers(
            orphanage, self._cancel_named, num_fronts=num_fronts, clock=clock
        )
        self._cache_feeds = CacheFeeds(cache_book)
        self._mail: list[tuple[int, bytes]] = []
        self._quarantine = quarantine or Quarantine((), lambda _: None)
        self._show_door = show_door
        self.hello_frame = encode(hello)
        self._carry_out = carry_out
        self._live_keys: dict[int, set[int]] = {}
        self._to_cancel: deque[tuple[int, FinishReason]] = deque()

    @property
    def num_live(self) -> int:
        """Requests of all fronts that have not ended."""
        return sum(map(len, self._live_keys.values()))

    @property
    def has_own_work(self) -> bool:
        """True when `step` has something to do or to send, whatever the engine has to do."""
        return (
            bool(self._to_cancel or self._mail)
            or self._quarantine.has_work
            or self._cache_feeds.has_work
        )

    def front_came(self, front_id: int) -> bytes:
        """A front said hello; returns the frame that answers it."""
        if self._to_cancel:
            # One that has come back may use its keys again.
            self._cancel_first(len(self._to_cancel))
        self._live_keys[front_id] = set()
        self._post(self._hand_overs.front_came(front_id))
        return self.hello_frame

    def front_gone(self, front_id: int) -> None:
        """A front has disconnected: what cannot be resumed elsewhere is of no use any more."""
        keys = self._live_keys.pop(front_id, set())
        num_kept = self._orphanage.front_gone(front_id, self.engine.output_tokens)
        self._post(self._hand_overs.front_gone(front_id))
        self._cache_feeds.front_gone(front_id)
        self._quarantine.front_gone(front_id)
        if num_kept:
            others = f", {len(keys)} running outputs are stopped" if keys else ""
            log.info("front %d is gone, %d requests can be resumed%s", front_id, num_kept, others)
        elif keys:
            log.info("front %d is gone, its %d requests are cancelled", front_id, len(keys))
        if keys:
            self._cancel_soon(keys, FinishReason.CANCELLED)

    def handle(self, front_id: int, frame: Frame) -> bytes | None:
        """Act on one frame of a front; returns the frame that answers it, if any.

        Raises LinkError when the front breaks the protocol: hang up on it.
        """
        match frame:
            case Submit(specs=specs):
                self._submit(front_id, specs)
            case Cancel(keys=keys, reason=reason):
                self._cancel_soon(self._live_keys[front_id].intersection(keys.tolist()), reason)
            case CancelById(ticket=ticket, request_id=request_id):
                state = self._cancel_named(request_id)
                return encode(CancelAnswer(ticket=ticket, state=state))
            case Keep() as keep:
                self._keep(front_id, keep)
            case Claim() as claim:
                self._post(self._hand_overs.claim(front_id, claim, self._live_keys))
            case Give(ticket=ticket, inheritance=inheritance, lack=lack):
                self._post(self._hand_overs.given(front_id, ticket, inheritance, lack))
            case Settle() as settle:
                self._post(self._hand_overs.settle(front_id, settle))
            case Follow() as wish:
                self._cache_feeds.follow(front_id, wish)
            case Unfollow(ticket=ticket):
                self._cache_feeds.unfollow(front_id, ticket)
            case other:
                raise LinkError(f"a front does not send {type(other).__name__}")
        return None

    def observe(self, frame: Frame, answer: Callable[[bytes], None]) -> None:
        """Act on one frame of an observer. `answer` takes frames for it, from any thread.

        Raises LinkError when the observer breaks the protocol.
        """
        match frame:
            case Look(ticket=ticket):
                answer(encode(LookAnswer(ticket=ticket, views=self.engine.look())))
            case Order() as order if self._carry_out is not None:
                self._carry_out(order, lambda done: answer(encode(done)))
            case Order(ticket=ticket):
                answer(encode(OrderAnswer(ticket=ticket, problem="it takes no orders")))
            case other:
                raise LinkError(f"an observer does not send {type(other).__name__}")

    def step(self) -> list[tuple[int, bytes]]:
        """One engine step; the frames it gives, one per front with news."""
        if self._to_cancel:
            self._cancel_first(_MAX_CANCELS)
        quarantine = self._quarantine
        if quarantine.has_work:
            self._hand_in(quarantine.next_trial())
        events = quarantine.heard(self.engine.step())
        frames, self._mail = self._mail, []
        frames += [(front_id, encode(news)) for front_id, news in self._cache_feeds.take()]
        if events.is_empty:
            return frames
        self.num_output_tokens += len(events.keys)
        for change in events.changes:
            if isinstance(change, Queued):
                self.newest_queue_s = change.estimated_queue_s
        for end in events.ends:
            is_well = isinstance(end, Finished) and end.reason in _OWN_ENDS
            self._orphanage.ended(end.key, is_well=is_well)
            if isinstance(end, Failed) and end.detail:
                # The one place that hears of it: clients are told the reason only.
                log.warning(
                    "a request failed in its step: %s",
                    end.detail,
                    extra={
                        "request_id": end.request_id,
                        "trace_id": end.trace_id.hex(),
                        "step": events.step,
                    },
                )
        for front_id, news in split_by_front(events):
            live = self._live_keys.get(front_id)
            if live is None:
                continue
            live.difference_update([end.key for end in news.ends])
            frames.append((front_id, encode(news)))
        return frames

    def sweep(self) -> None:
        """To be called about once a second: nothing is kept for longer, and nobody waits longer."""
        self._orphanage.sweep()
        self._post(self._hand_overs.sweep())

    def _keep(self, front_id: int, keep: Keep) -> None:
        if any(key not in self._live_keys[front_id] for _, key in keep.keys):
            return  # it ended while this travelled
        if self._hand_overs.is_elsewhere(front_id, keep):
            # Its front was away, and somebody came for it meanwhile.
            self._post([(front_id, Gone(name=keep.name))])
            return
        self._orphanage.keep(front_id, keep)

    def _post(self, mail: Mail) -> None:
        """For fronts, with the next step's news."""
        self._mail += [(front_id, encode(frame)) for front_id, frame in mail]

    def _cancel_named(self, request_id: str) -> RequestState | None:
        state = self._quarantine.cancel_by_id(request_id)
        return self.engine.cancel_by_id(request_id) if state is None else state

    def _cancel_soon(self, keys: Iterable[int], reason: FinishReason) -> None:
        """Cancel now as many as may be, and the rest before the next steps."""
        is_first = not self._to_cancel
        self._to_cancel.extend((key, reason) for key in keys)
        if is_first:
            self._cancel_first(_MAX_CANCELS)

    def _cancel_first(self, max_keys: int) -> None:
        for _ in range(min(max_keys, len(self._to_cancel))):
            # One that has ended since is not live, and nothing happens.
            key, reason = self._to_cancel.popleft()
            if not self._quarantine.cancel(key, reason):
                self.engine.cancel(key, reason)

    def _submit(self, front_id: int, specs: tuple[RequestSpec, ...]) -> None:
        live = self._live_keys[front_id]
        keys = [spec.key for spec in specs]
        for key in keys:
            if key >> FRONT_SHIFT != front_id:
                raise LinkError(f"key {key} does not belong to front {front_id}")
        if not live.isdisjoint(keys) or len(set(keys)) != len(keys):
            raise LinkError("a key is used twice")
        live.update(keys)
        if not self._quarantine.takes(front_id, specs):
            self._hand_in(specs)

    def _hand_in(self, specs: tuple[RequestSpec, ...]) -> None:
        if not specs:
            return
        if self._show_door is None:
            self.engine.submit(specs)
            return
        # What this raises ends the engine: then it stays written who was at the door.
        self._show_door(specs[0].key)
        self.engine.submit(specs)
        self._show_door(0)


def cancel_frame(keys: tuple[int, ...], reason: FinishReason) -> bytes:
    """The frame that asks for the end of requests."""
    return encode(Cancel(keys=np.array(keys, dtype=np.int64), reason=reason))
