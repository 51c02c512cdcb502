"""The accounts of a front's requests, and the delivery of their records.

Owns that each request has exactly one record, and that making it neither fails the request nor
costs anything when records are off. Single event loop.
"""

import logging
import traceback
from collections.abc import Callable
from typing import Final

from penstock.scheduler.events import Admitted, Failed, Finished
from penstock.server.front.request_account import Outcome, RequestAccount
from penstock.server.observe.request_recorder import RequestRecorder
from penstock.server.observe.trace_context import NOT_TRACED, RemoteParent, TraceIds

_log = logging.getLogger(__name__)
MAX_WAITING: Final = 1024
"""Records that may wait for their engine's end event; beyond this the oldest is written without."""
MAX_WAIT_S: Final = 1.0


class Accounts:
    """Opens accounts, and has `recorder` note the record of each when it is closed.

    Without a recorder nothing is noted. `is_tracing`: requests get ids of traces. `has_content`:
    their records include prompts and outputs.
    """

    def __init__(
        self,
        recorder: RequestRecorder | None,
        *,
        is_tracing: bool,
        front_id: int,
        has_content: bool,
    ) -> None:
        self.is_tracing = is_tracing
        self.has_content = has_content and recorder is not None
        self._recorder = recorder
        self._front_id = front_id
        self._ids = TraceIds()
        self._pending = PendingRecords(self._record)

    @property
    def are_kept(self) -> bool:
        """Whether there is a recorder."""
        return self._recorder is not None

    def open(
        self, method: str, *, arrival_s: float, peer: str = "", parent: RemoteParent | None = None
    ) -> RequestAccount:
        """A request has arrived; `parent`: of its trace, if its caller sent one."""
        trace = self._ids.begin(parent) if self.is_tracing else NOT_TRACED
        return RequestAccount(method, peer, arrival_s, trace)

    def close(
        self, account: RequestAccount, outcome: Outcome, now_s: float, *, is_engine_up: bool
    ) -> None:
        """Close the account; only the first call has an effect."""
        if self._recorder is None or account.outcome is not None:
            return
        account.seal(outcome, now_s)
        live = account.live
        if is_engine_up and live is not None and not live.has_engine_end and live.specs:
            self._pending.hold(live.specs[0].key, account)
        else:
            self._record(account)

    def on_late_event(self, event: Admitted | Finished | Failed) -> None:
        """The admission or the end of a request that was released."""
        if isinstance(event, Admitted):
            self._pending.on_admitted(event)
        else:
            self._pending.on_end(event)

    def sweep(self, now_s: float) -> None:
        """Call about once a second: limits how long a record waits."""
        self._pending.flush(now_s - MAX_WAIT_S)

    def settle(self) -> None:
        """The engine is lost: write the records that wait for its events."""
        self._pending.flush(float("inf"))

    def _record(self, account: RequestAccount) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        sequence = recorder.num_records
        try:
            recorder.note(
                account.record(
                    sequence=sequence, front_id=self._front_id, has_content=self.has_content
                )
            )
        except Exception as error:
            # A bug of ours must not reach the request, which has had its answer.
            if recorder.num_records == sequence:
                outcome = account.outcome or Outcome(code=0)
                recorder.note_unreadable(account.method, outcome.code, outcome.reason)
            # Frames only: the text of an exception may quote a prompt.
            frames = "".join(traceback.format_tb(error.__traceback__))
            _log.error("a record could not be made: %s\n%s", type(error).__name__, frames)


class PendingRecords:
    """Accounts that are sealed but wait for the engine's end event, by the key of their first
    output. Each is passed to `record` once.
    """

    def __init__(self, record: Callable[[RequestAccount], None]) -> None:
        self._record = record
        self._waiting: dict[int, RequestAccount] = {}

    def hold(self, key: int, account: RequestAccount) -> None:
        """Record `account` once `key` has ended in the engine."""
        self._waiting[key] = account
        if len(self._waiting) > MAX_WAITING:
            self._record(self._waiting.pop(next(iter(self._waiting))))

    def on_admitted(self, change: Admitted) -> None:
        """A released request was admitted before its cancel reached the engine.

        Only this event explains its wait: the end that follows explains its stay in the batch.
        """
        account = self._waiting.get(change.key)
        if account is not None and account.live is not None:
            account.live.phases.explain(wait=change.wait)

    def on_end(self, end: Finished | Failed) -> None:
        """The end event of a request that was released."""
        account = self._waiting.pop(end.key, None)
        if account is None:
            return
        if account.live is not None:
            account.live.phases.explain(wait=end.wait, stay=end.stay)
        self._record(account)

    def flush(self, oldest_s: float) -> None:
        """Record everything that was sealed before `oldest_s`."""
        while self._waiting:
            key, account = next(iter(self._waiting.items()))
            if account.end_s >= oldest_s:
                return
            del self._waiting[key]
            self._record(account)
