"""One logical stream over all its attempts: its position, and the message of the next attempt.

Decides whether a broken stream is resumed, is retried, or ends with the error. Does no I/O:
`calls.py` makes the attempts.
"""

import penstock.v1 as pb
from penstock.client.errors import PenstockError
from penstock.client.resuming import Recovery, ResumePoint
from penstock.client.retry import Attempts
from penstock.client.stream_reader import StreamReader


class LogicalStream:
    """The stream of `request`, or of a request that is resumed at `point` if `request` is None.

    If `is_buffered`, the caller delivers the events only when all have arrived, so received output
    does not prevent a retry.
    """

    def __init__(
        self,
        request: pb.GenerateRequest | None,
        attempts: Attempts,
        recovery: Recovery,
        *,
        is_buffered: bool = False,
        point: ResumePoint | None = None,
    ) -> None:
        self.reader = StreamReader(point)
        self.attempts = attempts
        self._request = request
        self._recovery = recovery
        self._is_buffered = is_buffered
        if point is not None:
            recovery.begin_at(point.next_sequence)

    @property
    def can_outlive_call(self) -> bool:
        """True if the stream has a resume timeout, so that the request can continue after its call
        ends."""
        return self._recovery.is_possible

    @property
    def outlives_call(self) -> bool:
        """True if the stream has a resume timeout and the server has accepted the request, so that
        the request continues when its call ends."""
        return self.can_outlive_call and bool(self.reader.request_id)

    def next_request(self) -> pb.GenerateRequest | pb.ResumeRequest:
        """Return the message of the next attempt: a ResumeRequest to continue the stream, otherwise
        the original request."""
        if self._request is None or self._recovery.is_resuming:
            return self.reader.next_point().message()
        return self._request

    def delay_after(self, error: PenstockError) -> float | None:
        """Prepare the next attempt after an error; return the seconds to wait before it, or None to
        raise the error."""
        reader = self.reader
        delay_s = self._recovery.delay_after(
            error, request_id=reader.request_id, next_sequence=reader.point.next_sequence
        )
        if delay_s is not None:
            return delay_s
        has_output = reader.has_output and not self._is_buffered
        if self._request is None:
            # Resuming again is safe, because nothing is delivered twice.
            return self.attempts.delay_after(error)
        delay_s = self.attempts.delay_after(self._recovery.explain(error), has_output=has_output)
        if delay_s is not None:
            self.reader = StreamReader()
        return delay_s

    def explain(self, error: PenstockError) -> PenstockError:
        """Return the error to raise after the last attempt: `error`, or an earlier one that
        explains it. If it has no request id, it gets the id that the caller chose."""
        error = self.attempts.explain(self._recovery.explain(error))
        request_id = self._request.request_id if self._request is not None else ""
        return error if error.request_id else error.of_request(request_id)
