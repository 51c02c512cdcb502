"""The requests of one front that have ended: counted, and passed on as records.

Owns the counts by outcome and the numbers of the records. Does not know where the bytes go; it
never waits for them to get there. Single event loop.
"""

from collections.abc import Callable

from penstock.server.observe.heartbeat import OutcomeCount
from penstock.server.observe.request_record import RequestRecord, encode_record

NO_ROOM = "no_room"
"""Why a record was dropped: `offer` did not take it."""
UNREADABLE = "unreadable"
"""Why a record was dropped: by a fault of ours it could not be made."""


class RequestRecorder:
    """Takes every record once.

    `offer` is handed each as bytes (see `encode_record`) and says whether it took them; it must
    not block. Without it records are only counted. `num_records`: counted so far, and so the
    sequence number of the next. `dropped_records`: how many of them were lost, by reason.
    """

    def __init__(self, offer: Callable[[bytes], bool] | None = None) -> None:
        self._offer = offer
        self._outcomes: dict[tuple[str, int, str, str], int] = {}
        self.num_records = 0
        self.dropped_records: dict[str, int] = {}

    def note(self, record: RequestRecord) -> None:
        """One more. Raises ValueError unless its sequence is `num_records`: two would be one."""
        if record.sequence != self.num_records:
            raise ValueError(f"sequence must be {self.num_records}, not {record.sequence}")
        data = b"" if self._offer is None else encode_record(record)
        self.num_records += 1
        finish_reason = record.finish_reasons[0] if record.finish_reasons else ""
        self._count((record.method, record.code, record.reason, finish_reason))
        if self._offer is not None and not self._offer(data):
            self._drop(NO_ROOM)

    def note_unreadable(self, method: str, code: int, reason: str) -> None:
        """One more, whose record could not be made."""
        self.num_records += 1
        self._count((method, code, reason, ""))
        self._drop(UNREADABLE)

    def outcomes(self) -> tuple[OutcomeCount, ...]:
        """How many requests have ended in each way, since the front's start."""
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
