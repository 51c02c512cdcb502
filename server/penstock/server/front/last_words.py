"""Records that still lack the engine's last word on their request.

Who leaves the queue or the batch because its client left, or because of a stop string, is told of
by the engine one step later: how long it waited for what, how many steps it ran. That is what
somebody wants to know of a request that was given up, so its record waits for it a little.

Owns who is waited for, and how long. Single event loop.
"""

from collections.abc import Callable
from typing import Final

from penstock.scheduler.events import Failed, Finished
from penstock.server.front.request_account import RequestAccount

MAX_WAITING: Final = 1024
"""Where more are waited for, the oldest go without."""
PATIENCE_S: Final = 1.0


class LastWords:
    """Accounts that are sealed, by the key of their first output. `tell` is given each once."""

    def __init__(self, tell: Callable[[RequestAccount], None]) -> None:
        self._tell = tell
        self._waiting: dict[int, RequestAccount] = {}

    def hold(self, key: int, account: RequestAccount) -> None:
        """Tell of `account` once the engine has said how `key` ended."""
        self._waiting[key] = account
        if len(self._waiting) > MAX_WAITING:
            self._tell(self._waiting.pop(next(iter(self._waiting))))

    def hear(self, end: Finished | Failed) -> None:
        """An end that the engine tells of a request that was released."""
        account = self._waiting.pop(end.key, None)
        if account is None:
            return
        if account.live is not None:
            account.live.phases.explain(wait=end.wait, stay=end.stay)
        self._tell(account)

    def give_up(self, oldest_s: float) -> None:
        """Tell of all that were sealed before `oldest_s`, as they are."""
        while self._waiting:
            key, account = next(iter(self._waiting.items()))
            if account.end_s >= oldest_s:
                return
            del self._waiting[key]
            self._tell(account)
