"""Counts the ended requests of one front and passes them on as records.

Owns the counts by outcome and the sequence numbers. Does not know the destination and never waits
for it. Single event loop.
"""

from collections.abc import Callable

from penstock.server.observe.heartbeat import OutcomeCount
from penstock.server.observe.request_record import RequestRecord, encode_record

NO_ROOM = "no_room"
"""Why a record was dropped: `offer` rejected it."""
UNREADABLE = "unreadable"
"""Why a record was dropped: an internal error."""


class RequestRecorder:
    """Takes every record once.

    `offer` receives each one encoded (see `encode_record`) and returns whether it accepted it; it
    must not block. Without it records are only counted. `num_records`: counted so far, and the
    sequence number of the next one. `dropped_records`: number of lost ones by reason.
    """

    def __init__(self, offer: Callable[[bytes], bool] | None = None) -> None:
        self._offer = offer
        self._outcomes: dict[tuple[str, int, str, str], int] = {}
        self.num_records = 0
        self.dropped_records: dict[str, int] = {}

    def note(self, record: RequestRecord) -> None:
        """Add a record. Raises ValueError unless its sequence is `num_records`."""
        if record.sequence != self.num_records:
            raise ValueError(f"sequence must be {self.num_records}, not {record.sequence}")
        data = b"" if self._offer is None else encode_record(record)
        self.num_records += 1
        finish_reason = record.finish_reasons[0] if record.finish_reasons else ""
        self._count((record.method, record.code, record.reason, finish_reason))
        if self._offer is not None and not self._offer(data):
            self._drop(NO_ROOM)

    def note_unreadable(self, method: str, code: int, reason: str) -> None:
        """Count a request whose record could not be made."""
        self.num_records += 1
        self._count((method, code, reason, ""))
        self._drop(UNREADABLE)

    def outcomes(self) -> tuple[OutcomeCount, ...]:
        """Number of ended requests by outcome, since the front's start."""
        return tuple(
            OutcomeCount(
                method=method, code=code, reason=reason, finish_reason=finish_reason, num=num
            )
            for (method, code, reason, finish_reason), num in self._outcomes.items()
        )

    def _count(self, ending: tuple[str, int, str, str]) -> None:
        self._outcomes[ending] = self._outcomes.get(ending, 0) + 1

    def _drop(self, why: str) -> None:
        self.dropped_records[why] = self.dropped_records.get(why, 0) + 1
