"""One logical stream over all its attempts: its position, and the request of the next attempt.

Owns the choice between resuming a broken stream, retrying it and raising the error.
Does no I/O: the clients make the attempts.
"""

import penstock.v1 as pb
from penstock.client.errors import PenstockError
from penstock.client.resuming import Recovery, ResumePoint
from penstock.client.retry import Attempts
from penstock.client.stream_reader import StreamReader


class Passage:
    """The stream of `request`; None: of a request that is resumed at `point`.

    `is_whole`: no event is delivered before the last, so output does not prevent a retry.
    """

    def __init__(
        self,
        request: pb.GenerateRequest | None,
        attempts: Attempts,
        recovery: Recovery,
        *,
        is_whole: bool = False,
        point: ResumePoint | None = None,
    ) -> None:
        self.reader = StreamReader(point)
        self.attempts = attempts
        self._request = request
        self._recovery = recovery
        self._is_whole = is_whole
        if point is not None:
            recovery.begin_at(point.next_sequence)

    @property
    def can_live_on(self) -> bool:
        """Whether the request has a resume timeout, with which it continues after its call ends."""
        return self._recovery.is_possible

    @property
    def may_live_on(self) -> bool:
        """Whether the server has accepted the request and continues it when its call ends."""
        return self.can_live_on and bool(self.reader.request_id)

    def next_request(self) -> pb.GenerateRequest | pb.ResumeRequest:
        """Return the message of the next attempt."""
        if self._request is None or self._recovery.is_under_way:
            return self.reader.next_point().message()
        return self._request

    def delay_after(self, error: PenstockError) -> float | None:
        """Return the seconds to wait before the next attempt; None to raise the error."""
        reader = self.reader
        delay_s = self._recovery.delay_after(
            error, request_id=reader.request_id, next_sequence=reader.point.next_sequence
        )
        if delay_s is not None:
            return delay_s
        has_output = reader.has_output and not self._is_whole
        if self._request is None:
            # Resuming again is safe: nothing is delivered twice.
            return self.attempts.delay_after(error)
        delay_s = self.attempts.delay_after(self._recovery.explain(error), has_output=has_output)
        if delay_s is not None:
            self.reader = StreamReader()
        return delay_s

    def explain(self, error: PenstockError) -> PenstockError:
        """Return the error to raise, with the request id if the caller chose it."""
        error = self.attempts.explain(self._recovery.explain(error))
        request_id = self._request.request_id if self._request is not None else ""
        return error if error.request_id else error.of_request(request_id)
