"""What an engine does with the frames of its fronts, whatever carries them.

Owns which front has which live requests, so that a front that goes takes its requests along. Does
not know sockets or threads: the Unix-socket side and the in-memory side both drive it.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from penstock.scheduler.events import Failed, StepEvents
from penstock.scheduler.live_view import LiveView
from penstock.scheduler.request import FinishReason, RequestSpec
from penstock.scheduler.state import RequestState
from penstock.server.link.frames import Cancel, CancelAnswer, CancelById, decode, encode
from penstock.server.link.look_frames import Look, LookAnswer, Order, OrderAnswer
from penstock.server.link.ports import EngineHello
from penstock.server.link.spec_frames import Submit
from penstock.server.link.step_frames import FRONT_SHIFT, split_by_front
from penstock.server.link.wire import LinkError

log = logging.getLogger(__name__)

_MAX_CANCELS = 64
"""Requests that are cancelled between two steps, some 20 us each: a thousand at once would hold up
every other stream."""


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

    def check_integrity(self) -> None:
        """Raises when the books are wrong."""
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
    """

    def __init__(
        self, engine: EngineCore, hello: EngineHello, *, carry_out: CarryOut | None = None
    ) -> None:
        self.engine = engine
        self.hello_frame = encode(hello)
        self._carry_out = carry_out
        self._live_keys: dict[int, set[int]] = {}
        self._to_cancel: deque[tuple[int, FinishReason]] = deque()

    @property
    def num_live(self) -> int:
        """Requests of all fronts that have not ended."""
        return sum(map(len, self._live_keys.values()))

    def front_came(self, front_id: int) -> bytes:
        """A front said hello; returns the frame that answers it."""
        if self._to_cancel:
            # One that has come back may use its keys again.
            self._cancel_first(len(self._to_cancel))
        self._live_keys[front_id] = set()
        return self.hello_frame

    def front_gone(self, front_id: int) -> None:
        """A front hung up: nobody waits for its requests any more."""
        keys = self._live_keys.pop(front_id, set())
        if keys:
            log.info("front %d is gone, its %d requests are cancelled", front_id, len(keys))
            self._cancel_soon(keys, FinishReason.CANCELLED)

    def handle(self, front_id: int, kind: int, body: bytes) -> bytes | None:
        """Act on one frame of a front; returns the frame that answers it, if any.

        Raises LinkError when the front breaks the protocol: hang up on it.
        """
        match decode(kind, body):
            case Submit(specs=specs):
                self._submit(front_id, specs)
            case Cancel(keys=keys, reason=reason):
                self._cancel_soon(self._live_keys[front_id].intersection(keys.tolist()), reason)
            case CancelById(ticket=ticket, request_id=request_id):
                state = self.engine.cancel_by_id(request_id)
                return encode(CancelAnswer(ticket=ticket, state=state))
            case other:
                raise LinkError(f"a front does not send {type(other).__name__}")
        return None

    def observe(self, kind: int, body: bytes, answer: Callable[[bytes], None]) -> None:
        """Act on one frame of an observer. `answer` takes frames for it, from any thread.

        Raises LinkError when the observer breaks the protocol.
        """
        match decode(kind, body):
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
        events = self.engine.step()
        if events.is_empty:
            return []
        for end in events.ends:
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
        frames: list[tuple[int, bytes]] = []
        for front_id, news in split_by_front(events):
            live = self._live_keys.get(front_id)
            if live is None:
                continue
            live.difference_update([end.key for end in news.ends])
            frames.append((front_id, encode(news)))
        return frames

    def _cancel_soon(self, keys: Iterable[int], reason: FinishReason) -> None:
        """Cancel now as many as may be, and the rest before the next steps."""
        is_first = not self._to_cancel
        self._to_cancel.extend((key, reason) for key in keys)
        if is_first:
            self._cancel_first(_MAX_CANCELS)

    def _cancel_first(self, max_keys: int) -> None:
        for _ in range(min(max_keys, len(self._to_cancel))):
            # One that has ended since is not live, and nothing happens.
            self.engine.cancel(*self._to_cancel.popleft())

    def _submit(self, front_id: int, specs: tuple[RequestSpec, ...]) -> None:
        live = self._live_keys[front_id]
        keys = [spec.key for spec in specs]
        for key in keys:
            if key >> FRONT_SHIFT != front_id:
                raise LinkError(f"key {key} does not belong to front {front_id}")
        if not live.isdisjoint(keys) or len(set(keys)) != len(keys):
            raise LinkError("a key is used twice")
        if specs:
            live.update(keys)
            self.engine.submit(specs)


def cancel_frame(keys: tuple[int, ...], reason: FinishReason) -> bytes:
    """The frame that asks for the end of requests."""
    return encode(Cancel(keys=np.array(keys, dtype=np.int64), reason=reason))
