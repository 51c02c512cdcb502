"""One request of a Multiplex stream: what may be written now.

Owns its credit and its ready mark. Does not know the other requests.
"""

from collections.abc import Callable, Sequence

from penstock.scheduler.request import NO_TIME
from penstock.server.front.errors import Refusal
from penstock.server.front.front import Front
from penstock.server.front.live_request import LiveRequest
from penstock.server.front.request_account import RequestAccount
from penstock.server.front.shared_writer import SharedWriter
from penstock.server.front.stream import TokenStream, num_tokens_of
from penstock.server.rpc.mapping_out import encoder_for
from penstock.server.rpc.multiplex_encoding import MultiplexEncoder

_MAX_BYTES_PER_CHAR = 4


class MultiplexedRequest:
    """A request under its key. `num_credit_tokens` None: no limit.

    `request`: the live request, None for one that was refused. `is_ended`: its last event was
    taken.
    """

    __slots__ = (
        "_clock",
        "_encoder",
        "_is_marked",
        "_num_credit_tokens",
        "_refusal",
        "_request_id",
        "_stream",
        "_writer",
        "account",
        "is_ended",
        "key",
        "request",
    )

    def __init__(
        self,
        key: int,
        writer: "SharedWriter[MultiplexedRequest]",
        account: RequestAccount,
        *,
        num_credit_tokens: int | None = None,
    ) -> None:
        self.key = key
        self.account = account
        self.request: LiveRequest | None = None
        self.is_ended = False
        self._clock: Callable[[], float] = lambda: NO_TIME
        self._writer = writer
        self._num_credit_tokens = num_credit_tokens
        self._encoder: MultiplexEncoder | None = None
        self._stream: TokenStream | None = None
        self._is_marked = False
        self._refusal: Refusal | None = None
        self._request_id = ""

    @property
    def refusal(self) -> Refusal | None:
        """Why it failed, if it did."""
        if self._refusal is not None or self.request is None:
            return self._refusal
        return self.request.stream.refusal

    @property
    def num_messages(self) -> int:
        """How many messages it would have received on a Generate stream."""
        return 0 if self._encoder is None else self._encoder.num_responses

    @property
    def request_id(self) -> str:
        """Its id, if known; else empty."""
        return self._request_id if self.request is None else self.request.request_id

    def live(self, request: LiveRequest, front: Front) -> None:
        """`front` has opened it: from now on its events are written."""
        config = front.config
        self.request = request
        self._stream = request.stream
        self._clock = front.clock
        self._encoder = MultiplexEncoder(
            self.key,
            encoder_for(request.generation.output.chunks, config, front.text.token_bytes),
            config.max_message_bytes_hint // _MAX_BYTES_PER_CHAR,
        )
        request.stream.attach(self.mark)
        self.mark()

    def refuse(self, refusal: Refusal, request_id: str) -> None:
        """The front has refused it."""
        self._refusal, self._request_id = refusal, request_id
        self.mark()

    def give_credit(self, num_tokens: int) -> None:
        """Allow that many more tokens; no effect without a limit."""
        if self._num_credit_tokens is not None:
            self._num_credit_tokens += num_tokens
            self.mark()

    def mark(self) -> None:
        """Mark that it may have events to write; idempotent until it is taken."""
        if not self._is_marked and not self.is_ended:
            self._is_marked = True
            self._writer.mark(self)

    def take(self) -> Sequence[bytes]:
        """Take all events that may be written now; sets `is_ended` with the last.

        A failure is not among them: see `refusal` once it has ended.
        """
        self._is_marked = False
        stream, encoder, credit = self._stream, self._encoder, self._num_credit_tokens
        if stream is None or encoder is None or self._refusal is not None:
            self.is_ended = self._refusal is not None
            return ()
        # The common case: one token of plain text per call.
        text = stream.take_text() if credit != 0 else None
        if text is not None:
            num_tokens = 1
            events: Sequence[bytes] = (encoder.encode_text(text),)
        else:
            batch = stream.take_due(credit)
            num_tokens = 0 if credit is None else num_tokens_of(batch)
            events = encoder.encode(batch) if batch else ()
        self.is_ended = stream.is_closed and stream.is_drained
        if credit is not None:
            self._num_credit_tokens = credit - num_tokens
            if stream.is_closed:
                # Where credit never comes, no backlog grows that would end it.
                stream.wait_for_reader(NO_TIME if self.is_ended else self._clock())
        return events

    def break_with(self, refusal: Refusal) -> None:
        """`take` failed: the events taken are lost, and the request ends here."""
        self._refusal = refusal
        self.is_ended = True
