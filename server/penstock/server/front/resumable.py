"""One request that may be resumed: its log, who reads it, and how long it is kept.

Owns the way from the request's events to numbered messages in the log, whether or not somebody
reads them. With a reader, what has come since its last write goes into one message, as in any
stream; without one, tokens are gathered into larger ones. Does not know gRPC: how events become
bytes is given. Single event loop.
"""

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from penstock.scheduler.request import NO_TIME
from penstock.scheduler.state import RequestState
from penstock.server.front.errors import ErrorReason, Refusal
from penstock.server.front.events import PromptPiece, StreamEvent
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.message_log import MessageLog
from penstock.server.link.resume_frames import Keepsake

SUPERSEDED: Final = Refusal(reason=ErrorReason.STREAM_SUPERSEDED)
_MAX_GATHERED_TOKENS: Final = 64
"""Tokens that wait for a message while nobody reads."""

Untold = Callable[[Iterable[StreamEvent], LiveRequest], Iterable[StreamEvent]]
Encode = Callable[[Iterable[StreamEvent]], Iterable[bytes]]


class LogReader(Protocol):
    """Who delivers a log's messages. `blocked_since_s`: NO_TIME while its peer takes them."""

    @property
    def blocked_since_s(self) -> float:
        """Since when one write waits for the peer."""
        ...

    def on_news(self) -> None:
        """There may be something to write. Must not block or raise."""
        ...

    def dismiss(self, refusal: Refusal) -> None:
        """Stop reading, now, and tell the peer this."""
        ...


class Resumable:
    """A request that outlives its call. `live` None: all that is left of it is its log.

    `keepsake`: the request as its client sent it, serialised. `expires_s`: NO_TIME while somebody
    reads. `on_change` is called after the log grew or ended. `untold`: leaves out of what comes
    what was told before. `num_prompt_records`: of the prompt, in the log so far.
    """

    __slots__ = (
        "_encode",
        "_on_change",
        "_untold",
        "again",
        "expires_s",
        "grace_s",
        "is_given_away",
        "keepsake",
        "live",
        "log",
        "num_prompt_records",
        "on_over",
        "reader",
        "request_id",
        "tenant",
    )

    def __init__(  # noqa: PLR0913 - what it is made of
        self,
        live: LiveRequest | None,
        log: MessageLog,
        *,
        request_id: str,
        tenant: str,
        grace_s: float,
        keepsake: bytes,
        encode: Encode,
        on_change: "Callable[[Resumable], None]",
        untold: Untold | None = None,
    ) -> None:
        self.live = live
        self.log = log
        self.request_id = request_id
        self.tenant = tenant
        self.grace_s = grace_s
        self.keepsake = keepsake
        self.reader: LogReader | None = None
        self.expires_s = NO_TIME
        self.on_over: Callable[[], None] | None = None
        """Told once when the request is over: whoever keeps its account closes it."""
        self.num_prompt_records = 0
        self.is_given_away = False
        self.again: Keepsake | None = None
        """What makes it once more, with the same outcome, after it has ended; None: nothing."""
        self._encode = encode
        self._on_change = on_change
        self._untold = untold
        if live is not None:
            live.stream.attach(self.on_ready)

    @property
    def state(self) -> RequestState:
        """Where the request stands."""
        if self.live is not None:
            return self.live.state
        return RequestState.COMPLETED if self.log.refusal is None else RequestState.ERROR

    def on_ready(self) -> None:
        """The stream has news: its reader takes them, or they are gathered."""
        live = self.live
        if live is None:
            return
        stream = live.stream
        if self.reader is not None:
            if stream.is_cut and stream.refusal is not None:
                self.reader.dismiss(stream.refusal)
            self.reader.on_news()
        elif stream.is_closed or stream.num_backlog_tokens >= _MAX_GATHERED_TOKENS:
            self.fill()

    def fill(self) -> None:
        """Write into the log what the request has to tell by now, of much a part."""
        live = self.live
        if live is not None and not self.log.is_ended:
            self.add(live.stream.take_due())

    def fill_all(self) -> None:
        """The same, and everything at once. Nothing may be held back."""
        while self.live is not None and self.live.stream.has_backlog and not self.log.is_ended:
            self.fill()
        self.fill()

    def add(self, batch: Iterable[StreamEvent]) -> tuple[bytes, ...]:
        """Write a batch that was taken from the stream into the log; the messages it made."""
        live, log = self.live, self.log
        sequence = log.next_sequence
        if self._untold is not None and live is not None:
            batch = self._untold(batch, live)
        batch = tuple(batch)
        for event in batch:
            if isinstance(event, PromptPiece):
                self.num_prompt_records += len(event.records)
        log.extend(self._encode(batch))
        messages = log.since(sequence)
        if live is not None and live.stream.is_drained:
            log.end(live.stream.refusal)
        if messages or log.is_ended:
            self._on_change(self)
        return messages

    def take_over(self, reader: LogReader) -> None:
        """`reader` delivers the log from now on; an older one is told so."""
        earlier, self.reader = self.reader, reader
        self.expires_s = NO_TIME
        if earlier is not None and earlier is not reader:
            earlier.dismiss(SUPERSEDED)
