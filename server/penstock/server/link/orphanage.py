"""What an engine keeps of requests whose front is gone, until another front comes for them.

Owns who outlives a front, and the bounds on what is kept of those: in time, their grace; in bytes
and in number, the oldest go first. A request that has ended is kept as long as one that has not:
its front may die with the end untold, and then it is generated again, to the same tokens. Holds
prompts and outputs, and shows them to nobody. Knows neither sockets nor the engine; times are
seconds on the engine's clock.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.request import NO_TIME
from penstock.server.link.resume_frames import OVERHEAD_BYTES, Inheritance, Keep, Keepsake


@dataclass(slots=True, eq=False)
class _Ward:
    """One request. `keys`: of the outputs that have not ended, by index."""

    name: str
    front_id: int
    keys: dict[int, int]
    keepsake: Keepsake
    expires_s: float = NO_TIME

    @property
    def num_bytes(self) -> int:
        return len(self.keepsake.message) + OVERHEAD_BYTES


@dataclass(slots=True, eq=False)
class _Orphan:
    """What is left of one."""

    inheritance: Inheritance
    expires_s: float
    num_bytes: int


class Orphanage:
    """The requests that outlive their fronts. `clock`: the engine's.

    `can_repeat`: the executor generates the same tokens again from the same seed; otherwise what
    is not known of a request is lost. `max_bytes` and `max_num` bound those who have no front, and
    apart from them those who have ended.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        can_repeat: bool,
        max_bytes: int = 64 * 1024 * 1024,
        max_num: int = 4096,
    ) -> None:
        self._clock = clock
        self._can_repeat = can_repeat
        self._max_bytes = max_bytes
        self._max_num = max_num
        self._wards: dict[str, _Ward] = {}
        self._by_key: dict[int, _Ward] = {}
        self._ended: dict[str, _Ward] = {}
        self._orphans: dict[str, _Orphan] = {}
        self._num_ended_bytes = 0
        self.num_bytes = 0
        """Of those who have no front, about."""

    def __len__(self) -> int:
        """Those who have no front."""
        return len(self._orphans)

    def has(self, name: str) -> bool:
        """Whether a request of this name has no front."""
        return name in self._orphans

    def owner_of(self, name: str) -> int | None:
        """The front of a request that outlives it, None where there is none."""
        ward = self._wards.get(name) or self._ended.get(name)
        return None if ward is None else ward.front_id

    def keep(self, front_id: int, keep: Keep) -> None:
        """A request of this front outlives it; told again when it was resubmitted."""
        self.forget(keep.name)
        ward = _Ward(keep.name, front_id, dict(keep.keys), keep.keepsake)
        self._wards[keep.name] = ward
        for key in ward.keys.values():
            self._by_key[key] = ward

    def ended(self, key: int, *, is_well: bool) -> None:
        """An output has ended; `is_well`: by itself, so that it would end so again."""
        ward = self._by_key.pop(key, None)
        if ward is None:
            return
        ward.keys = {index: other for index, other in ward.keys.items() if other != key}
        if not is_well or not self._can_repeat:
            self.forget(ward.name)
        elif not ward.keys and self._wards.pop(ward.name, None) is not None:
            ward.expires_s = self._clock() + ward.keepsake.grace_s
            self._ended[ward.name] = ward
            self._num_ended_bytes += ward.num_bytes
            while self._num_ended_bytes > self._max_bytes or len(self._ended) > self._max_num:
                self._drop_ended(next(iter(self._ended)))

    def forget(self, name: str) -> None:
        """It is over, or lives under other keys from now on."""
        ward = self._wards.pop(name, None)
        if ward is not None:
            for key in ward.keys.values():
                self._by_key.pop(key, None)
        self._drop_ended(name)
        self._drop_orphan(name)

    def front_gone(
        self, front_id: int, tokens_of: Callable[[int], NDArray[np.int32] | None]
    ) -> int:
        """A front is gone: take its requests in; how many. `tokens_of` a key, None if not live."""
        lost = [ward for ward in self._wards.values() if ward.front_id == front_id]
        lost += [ward for ward in self._ended.values() if ward.front_id == front_id]
        num_before = len(self._orphans)
        for ward in lost:
            found = ((index, tokens_of(key)) for index, key in sorted(ward.keys.items()))
            tokens = tuple((index, ids) for index, ids in found if ids is not None)
            self.forget(ward.name)
            if not self._can_repeat and len(tokens) < len(ward.keys):
                continue
            self.take_in(ward.name, Inheritance(keepsake=ward.keepsake, tokens=tokens))
        return max(0, len(self._orphans) - num_before)

    def take_in(self, name: str, inheritance: Inheritance) -> None:
        """Keep a request that has no front."""
        self._drop_orphan(name)
        expires_s = self._clock() + inheritance.keepsake.grace_s
        orphan = _Orphan(inheritance, expires_s, inheritance.num_bytes)
        self._orphans[name] = orphan
        self.num_bytes += orphan.num_bytes
        while self.num_bytes > self._max_bytes or len(self._orphans) > self._max_num:
            self._drop_orphan(next(iter(self._orphans)))

    def take(self, name: str) -> Inheritance | None:
        """Give a request away that has no front; None where there is none of this name."""
        orphan = self._orphans.get(name)
        if orphan is None or orphan.expires_s <= self._clock():
            return None
        self._drop_orphan(name)
        return orphan.inheritance

    def sweep(self) -> None:
        """To be called about once a second: whoever nobody came for in time is forgotten."""
        now_s = self._clock()
        for name in _expired(self._orphans, now_s):
            self._drop_orphan(name)
        for name in _expired(self._ended, now_s):
            self._drop_ended(name)

    def _drop_orphan(self, name: str) -> None:
        orphan = self._orphans.pop(name, None)
        if orphan is not None:
            self.num_bytes -= orphan.num_bytes

    def _drop_ended(self, name: str) -> None:
        ward = self._ended.pop(name, None)
        if ward is not None:
            self._num_ended_bytes -= ward.num_bytes


def _expired(kept: "dict[str, _Ward] | dict[str, _Orphan]", now_s: float) -> Iterable[str]:
    return [name for name, one in kept.items() if one.expires_s <= now_s]
