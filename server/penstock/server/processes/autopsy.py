"""Who was with the engines that died, and who of them is to be tried or refused by the next.

Owns the account of deaths by request and the judgement. An engine that ends by its own fault has
been brought down by something it was doing; one that was killed from outside most likely not, so
that this counts only when it happens to the same request again. Reads no board and starts nothing.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass

from penstock.server.link.suspect import Suspect

_FORGET_AFTER_S = 600.0
_MAX_KEPT = 4096
_FIRST_TRIAL_TOKENS = 2
_TRIAL_GROWTH = 8
_MAX_TRIAL_TOKENS = 128
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that somebody sends; a process brings others upon itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeath:
    """What is known of one. `is_its_own`: the engine's doing, not a kill from outside; `was_hung`:
    it stood still, which devices and drivers do without anybody's fault.

    `keys_in_hand`: who was in its last steps or at its door; `keys_on_trial`: the outputs of the
    one suspect that was being tried then.
    """

    is_its_own: bool
    keys_in_hand: frozenset[int]
    keys_on_trial: frozenset[int] = frozenset()
    was_hung: bool = False


def is_its_own(code: int, *, was_hung: bool) -> bool:
    """Whether a return code (negative: killed by that signal) tells of the engine's own doing."""
    return was_hung or code > 0 or (code < 0 and -code not in _FROM_OUTSIDE)


@dataclass(slots=True, eq=False)
class _Account:
    num_deaths: int = 0
    num_own: int = 0
    num_on_trial: int = 0
    last_s: float = 0.0
    is_poison: bool = False

    @property
    def is_to_be_tried(self) -> bool:
        return self.num_own > 0 or self.num_deaths > 1


class Autopsy:
    """Deaths by key. Keys of requests that have ended stay for a while: nobody uses them again.

    `clock` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[int, _Account] = {}

    def note(self, death: EngineDeath) -> None:
        """An engine died."""
        now_s, keys = self._clock(), death.keys_in_hand
        # Whoever was on trial but not in hand waited, and did nothing.
        tried = death.keys_on_trial if keys & death.keys_on_trial else frozenset[int]()
        self._forget(now_s)
        for key in keys | tried:
            account = self._accounts.pop(key, None) or _Account()
            self._accounts[key] = account  # at the end: the one that was touched last
            account.num_deaths += 1
            account.num_own += death.is_its_own
            account.num_on_trial += key in tried
            account.last_s = now_s
        for key in keys | tried:
            self._accounts[key].is_poison |= self._is_convicted(key, death, tried)

    def suspects(self) -> tuple[Suspect, ...]:
        """Whom the next engine is to try, and whom to refuse."""
        return tuple(
            Suspect(
                key=key,
                num_trial_tokens=_num_trial_tokens(account),
                is_poison=account.is_poison,
            )
            for key, account in self._accounts.items()
            if account.is_poison or account.is_to_be_tried
        )

    def _is_convicted(self, key: int, death: EngineDeath, tried: frozenset[int]) -> bool:
        account = self._accounts[key]
        is_alone = death.keys_in_hand == frozenset({key})
        if not death.is_its_own or (death.was_hung and not is_alone):
            # Twice while the same one was tried: that is no chance. (What eats all memory is killed
            # from outside.)
            return account.num_on_trial > 1
        return (is_alone or key in tried) and account.num_deaths > 1

    def _forget(self, now_s: float) -> None:
        for key, account in tuple(self._accounts.items()):
            is_old = account.last_s <= now_s - _FORGET_AFTER_S
            if not is_old and len(self._accounts) <= _MAX_KEPT:
                return
            del self._accounts[key]


def _num_trial_tokens(account: _Account) -> int:
    """Who passed once and was there again is tried for longer: it may strike late."""
    num_tokens = _FIRST_TRIAL_TOKENS
    for _ in range(1, account.num_own):
        num_tokens = min(num_tokens * _TRIAL_GROWTH, _MAX_TRIAL_TOKENS)
    return num_tokens
