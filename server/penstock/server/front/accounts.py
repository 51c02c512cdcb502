"""The accounts of one front's requests, and the way their records leave it.

Owns that each request has exactly one record, and that to make it neither fails the request nor
costs anything where nobody wants it. Single event loop.
"""

import logging
import traceback

from penstock.scheduler.events import Failed, Finished
from penstock.server.front.last_words import PATIENCE_S, LastWords
from penstock.server.front.request_account import Outcome, RequestAccount
from penstock.server.observe.request_recorder import RequestRecorder
from penstock.server.observe.trace_context import NOT_TRACED, RemoteParent, TraceIds

_log = logging.getLogger(__name__)


class Accounts:
    """Opens accounts, and has `recorder` note the record of each when it is closed.

    Without a recorder nothing is noted. `is_tracing`: requests get ids of traces. `has_content`:
    their records tell prompts and outputs.
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
        self._last_words = LastWords(self._tell)

    @property
    def are_kept(self) -> bool:
        """Whether anybody wants them."""
        return self._recorder is not None

    def open(
        self, method: str, *, arrival_s: float, peer: str = "", parent: RemoteParent | None = None
    ) -> RequestAccount:
        """A request has arrived; `parent`: of its trace, if its caller named one."""
        trace = self._ids.begin(parent) if self.is_tracing else NOT_TRACED
        return RequestAccount(method, peer, arrival_s, trace)

    def close(
        self, account: RequestAccount, outcome: Outcome, now_s: float, *, is_engine_up: bool
    ) -> None:
        """The request is over; only the first time counts."""
        if self._recorder is None or account.outcome is not None:
            return
        account.seal(outcome, now_s)
        live = account.live
        if is_engine_up and live is not None and not live.has_last_word and live.specs:
            self._last_words.hold(live.specs[0].key, account)
        else:
            self._tell(account)

    def hear_late_end(self, end: Finished | Failed) -> None:
        """The engine's word on a request that was released."""
        self._last_words.hear(end)

    def sweep(self, now_s: float) -> None:
        """To be called about once a second: no record waits much longer."""
        self._last_words.give_up(now_s - PATIENCE_S)

    def settle(self) -> None:
        """The engine has nothing more to say: what waits for its word is told without."""
        self._last_words.give_up(float("inf"))

    def _tell(self, account: RequestAccount) -> None:
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
