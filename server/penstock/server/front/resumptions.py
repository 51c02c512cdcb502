"""Every request of one front that may be resumed, as long as it may.

Owns how long and how much is kept: each has its grace from when nobody reads it any more, ended or
not; the logs of all have a bound in bytes, and so has each; of those that nobody reads only so many
are kept. What exceeds a bound goes oldest first, and with it the request, if it still runs. Times
are seconds on the engine's clock. Single event loop.
"""

from collections.abc import Callable, Iterator
from typing import Final

from penstock.scheduler.state import RequestState
from penstock.server.front.config import FrontConfig
from penstock.server.front.errors import ErrorReason, Refusal, refuse
from penstock.server.front.inheriting import again_of
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.resumable import SUPERSEDED, LogReader, Resumable
from penstock.server.front.spares import Spares
from penstock.server.front.tenants import engine_request_id

STALLED: Final = Refusal(reason=ErrorReason.READER_STALLED)
_FORGOTTEN: Final = Refusal(reason=ErrorReason.REQUEST_NOT_FOUND)


class Resumptions:
    """By tenant and id. `release` ends a request that still runs; `cut` one whose reader stalls.

    `num_bytes`: of all logs and keepsakes, about.
    """

    def __init__(
        self,
        config: FrontConfig,
        *,
        clock: Callable[[], float],
        release: Callable[[LiveRequest], None],
        cut: Callable[[LiveRequest, str, float], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._release = release
        self._cut = cut
        self._all: dict[str, Resumable] = {}
        # Those that nobody reads, the longest unread first.
        self._parked: dict[Resumable, None] = {}
        self._sizes: dict[Resumable, int] = {}
        self.num_bytes = 0
        self.spares = Spares(config, clock)
        """Of those that were given away."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Resumable]:
        """A snapshot."""
        return iter(tuple(self._all.values()))

    @property
    def num_unread(self) -> int:
        """Those that nobody reads and that still run."""
        return sum(kept.live is not None for kept in self._parked)

    def find(self, request_id: str, tenant: str) -> Resumable | None:
        """The request of this id and tenant, whether it still runs or not."""
        return self._all.get(engine_request_id(tenant, request_id))

    def named(self, name: str) -> Resumable | None:
        """The same by the engine's name for it."""
        return self._all.get(name)

    def state_of(self, request_id: str, tenant: str) -> RequestState | None:
        """Where such a request stands; None where there is none."""
        kept = self.find(request_id, tenant)
        return None if kept is None else kept.state

    def make_room(self, num_bytes: int) -> None:
        """For a request whose keepsake is so large; raises RequestError where there is none."""
        while self.num_bytes + num_bytes > self._config.max_resume_bytes:
            if not self._drop_oldest(None):
                raise refuse(
                    ErrorReason.QUEUE_FULL, "too much is kept of requests that may be resumed"
                )

    def add(self, resumable: Resumable) -> None:
        """Keep it, with or without a reader. What is left of an earlier one of its id goes."""
        earlier = self.find(resumable.request_id, resumable.tenant)
        if earlier is not None:
            self.drop(earlier)
        name = engine_request_id(resumable.tenant, resumable.request_id)
        self._all[name] = resumable
        self.spares.drop(name)
        self._account(resumable)
        if resumable.reader is None:
            self._park(resumable)

    def take_over(self, resumable: Resumable, reader: LogReader) -> None:
        """`reader` reads it from now on; an older reader is told so."""
        if resumable.live is None and not resumable.log.is_ended:
            # It left between being found and being read: nothing would ever come.
            reader.dismiss(SUPERSEDED if resumable.is_given_away else _FORGOTTEN)
            return
        self._parked.pop(resumable, None)
        resumable.take_over(reader)

    def left(self, resumable: Resumable, reader: LogReader) -> None:
        """`reader` is gone, for whatever reason. What it never had waits for another."""
        if resumable.reader is not reader:
            return
        resumable.reader = None
        if self.find(resumable.request_id, resumable.tenant) is not resumable:
            self._retire(resumable)
            return
        self._park(resumable)

    def on_change(self, resumable: Resumable) -> None:
        """Its log grew or ended."""
        if resumable not in self._sizes:
            return
        resumable.log.trim(self._config.max_resume_bytes_per_request)
        self._account(resumable)
        if resumable.log.is_ended and resumable.reader is None:
            self._retire(resumable)
        while self.num_bytes > self._config.max_resume_bytes and self._drop_oldest(resumable):
            pass
        if self.num_bytes > self._config.max_resume_bytes:
            # All of it belongs to requests that are read: this one can go on, but not come back
            # to what it has been sent.
            resumable.log.trim(0)
            self._account(resumable)

    def drop(self, resumable: Resumable) -> None:
        """Nobody can resume it any more; what still runs of it without a reader ends."""
        key = engine_request_id(resumable.tenant, resumable.request_id)
        if self._all.get(key) is resumable:
            del self._all[key]
        self._parked.pop(resumable, None)
        self.num_bytes -= self._sizes.pop(resumable, 0)
        if resumable.reader is None:
            self._retire(resumable)

    def give_away(self, resumable: Resumable) -> None:
        """Another front has it from now on."""
        reader, resumable.reader = resumable.reader, None
        resumable.is_given_away = True
        self.drop(resumable)
        if reader is not None:
            reader.dismiss(SUPERSEDED)

    def sweep(self, now_s: float) -> None:
        """To be called about once a second: drops what has expired, cuts readers that stall."""
        for resumable in [kept for kept in self._parked if kept.expires_s <= now_s]:
            self.drop(resumable)
        self.spares.sweep(now_s)
        oldest_s = now_s - self._config.max_reader_stall_s
        for resumable in self:
            reader = resumable.reader
            if reader is None or reader.blocked_since_s >= oldest_s:
                continue
            if resumable.live is not None and not resumable.live.stream.is_cut:
                since_s = reader.blocked_since_s
                why = f"one write blocked for {now_s - since_s:.1f} s"
                self._cut(resumable.live, why, now_s)
            reader.dismiss(STALLED)

    def dismiss_all(self, refusal: Refusal) -> tuple[LiveRequest, ...]:
        """The front is about to go: readers are told `refusal`.

        Returns what still runs, which is not ended: whoever comes for it finds it in the engine.
        """
        running = tuple(kept.live for kept in self if kept.live is not None)
        for resumable in self:
            resumable.live = None
            if resumable.reader is not None:
                resumable.reader.dismiss(refusal)
            self.drop(resumable)
        return running

    def _park(self, resumable: Resumable) -> None:
        resumable.expires_s = self._clock() + resumable.grace_s
        self._parked[resumable] = None
        resumable.fill()
        if resumable.log.is_ended:
            self._retire(resumable)
            if not resumable.log.next_sequence:
                self.drop(resumable)  # refused: there was never anything to come back to
        if len(self._parked) > self._config.max_parked_requests:
            self._drop_oldest(None)

    def _drop_oldest(self, spared: Resumable | None) -> bool:
        oldest = next((kept for kept in self._parked if kept is not spared), None)
        if oldest is None:
            return False
        self.drop(oldest)
        return True

    def _retire(self, resumable: Resumable) -> None:
        """The request itself is over: it leaves the front, and what it has said stays."""
        live, resumable.live = resumable.live, None
        if live is not None:
            resumable.again = again_of(live)
            self._release(live)
        on_over, resumable.on_over = resumable.on_over, None
        if on_over is not None:
            on_over()
        if resumable in self._parked:
            resumable.expires_s = self._clock() + resumable.grace_s

    def _account(self, resumable: Resumable) -> None:
        size = resumable.log.num_bytes + len(resumable.keepsake)
        self.num_bytes += size - self._sizes.get(resumable, 0)
        self._sizes[resumable] = size
