"""Requests that each tenant may run so that its output lengths are learned.

Owns two allowances of every tenant. Does not know lengths, nor which requests they affect.

- **New.** Other tenants' output lengths predict little about a tenant with few ended outputs. A
  bounded number of its requests per minute are judged only by what is certain of them, as all are
  when an engine starts. The number is bounded over all tenants as well: where many are new, the
  lengths of all are those of many tenants and show what is usual, and without them an overloaded
  machine would compute answers that are late.
- **Unlikely.** A fixed share of the requests that learned lengths would reject is admitted. If all
  of them were rejected, shorter outputs would never be observed.
"""

import math
from dataclasses import dataclass

_OWN_SEEN = 16
"""A tenant with fewer observed outputs is new."""
_MAX_NEW = 16.0
"""Requests of a new tenant that are judged by what is certain, in a memory of a minute."""
_MAX_NEW_OF_ALL = 64.0
_MEMORY_S = 60.0
_EVERY = 64
_MAX_TENANTS = 4096


@dataclass(slots=True)
class _Account:
    """`num_new`: admitted requests of a new tenant, decaying, as of `at_s`."""

    num_new: float = 0.0
    at_s: float = -math.inf
    num_unlikely: int = 0

    def has_room(self, most: float, now: float) -> bool:
        self.num_new *= math.exp(-max(now - self.at_s, 0.0) / _MEMORY_S)
        self.at_s = max(now, self.at_s)
        return self.num_new + 1.0 <= most


class Exploration:
    """The allowances of all tenants; of very many, the most recently used."""

    __slots__ = ("_accounts", "_of_all")

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._of_all = _Account()

    def takes_new(self, tenant: str, num_seen: int, now: float) -> bool:
        """Whether a request counts as one of a new tenant; `num_seen`: observed outputs of that
        tenant.
        """
        if num_seen >= _OWN_SEEN:
            return False
        account = self._account_of(tenant)
        if not account.has_room(_MAX_NEW, now) or not self._of_all.has_room(_MAX_NEW_OF_ALL, now):
            return False
        account.num_new += 1.0
        self._of_all.num_new += 1.0
        return True

    def takes_unlikely(self, tenant: str) -> bool:
        """Whether a request is admitted although learned lengths would reject it."""
        account = self._account_of(tenant)
        account.num_unlikely += 1
        return account.num_unlikely % _EVERY == 0

    def _account_of(self, tenant: str) -> _Account:
        account = self._accounts.pop(tenant, None) or _Account()
        self._accounts[tenant] = account
        if len(self._accounts) > _MAX_TENANTS:
            del self._accounts[next(iter(self._accounts))]
        return account
