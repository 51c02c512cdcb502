"""Crash attribution: which requests were in the engines that died.

Decides which of them the next engine runs alone (probation) and which it refuses (quarantine).
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass

from penstock.server.link.quarantine import SuspectedRequest

_FORGET_AFTER_S = 600.0
_MAX_KEPT = 4096
_FIRST_PROBATION_TOKENS = 2
_PROBATION_GROWTH = 8
_MAX_PROBATION_TOKENS = 128
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that come from outside; a process causes the others itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeath:
    """How an engine died. `is_its_own`: the engine caused it, it was not killed from outside.
    `was_hung`: it made no progress, which a device or driver can cause.

    `keys_in_progress`: outputs of its last steps and of the request being submitted.
    `keys_on_probation`: outputs of the suspected request that ran alone.
    """

    is_its_own: bool
    keys_in_progress: frozenset[int]
    keys_on_probation: frozenset[int] = frozenset()
    was_hung: bool = False


def is_its_own(code: int, *, was_hung: bool) -> bool:
    """Whether a return code (negative: a signal) shows that the engine itself failed."""
    return was_hung or code > 0 or (code < 0 and -code not in _FROM_OUTSIDE)


@dataclass(slots=True, eq=False)
class _Account:
    num_deaths: int = 0
    num_own: int = 0
    num_on_probation: int = 0
    last_s: float = 0.0
    is_poison: bool = False

    @property
    def needs_probation(self) -> bool:
        return self.num_own > 0 or self.num_deaths > 1


class CrashAttribution:
    """Deaths by key. Keys of requests that have ended stay for a while; they are not used again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[int, _Account] = {}

    def note(self, death: EngineDeath) -> None:
        """Record the death of an engine."""
        now_s, keys = self._clock(), death.keys_in_progress
        # A request on probation that was not in progress was waiting and did nothing.
        tried = death.keys_on_probation if keys & death.keys_on_probation else frozenset[int]()
        self._forget(now_s)
        for key in keys | tried:
            account = self._accounts.pop(key, None) or _Account()
            self._accounts[key] = account  # moved to the end: the most recently used
            account.num_deaths += 1
            account.num_own += death.is_its_own
            account.num_on_probation += key in tried
            account.last_s = now_s
        for key in keys | tried:
            self._accounts[key].is_poison |= self._is_quarantined(key, death, tried)

    def suspects(self) -> tuple[SuspectedRequest, ...]:
        """The requests that the next engine runs alone or refuses."""
        return tuple(
            SuspectedRequest(
                key=key,
                num_probation_tokens=_num_probation_tokens(account),
                is_poison=account.is_poison,
            )
            for key, account in self._accounts.items()
            if account.is_poison or account.needs_probation
        )

    def _is_quarantined(self, key: int, death: EngineDeath, tried: frozenset[int]) -> bool:
        account = self._accounts[key]
        is_alone = death.keys_in_progress == frozenset({key})
        if not death.is_its_own or (death.was_hung and not is_alone):
            # Dying twice while the same request is on probation is no coincidence. (The kernel
            # kills a process that uses up the memory, which looks like a kill from outside.)
            return account.num_on_probation > 1
        return (is_alone or key in tried) and account.num_deaths > 1

    def _forget(self, now_s: float) -> None:
        for key, account in tuple(self._accounts.items()):
            is_old = account.last_s <= now_s - _FORGET_AFTER_S
            if not is_old and len(self._accounts) <= _MAX_KEPT:
                return
            del self._accounts[key]


def _num_probation_tokens(account: _Account) -> int:
    """A request that passed and was in another crash gets a longer probation: it may fail late."""
    num_tokens = _FIRST_PROBATION_TOKENS
    for _ in range(1, account.num_own):
        num_tokens = min(num_tokens * _PROBATION_GROWTH, _MAX_PROBATION_TOKENS)
    return num_tokens
