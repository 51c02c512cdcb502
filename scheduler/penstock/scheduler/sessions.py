"""Sessions: the blocks of a conversation are kept for its next turn.

Owns which blocks each session holds, for how long, and how many all sessions may hold. Does not
know requests or the order of cached blocks: it reports whether a block is held.

A held block that is not used is cached like any other, at a higher level: it is evicted after all
blocks of lower levels, and before any running request is preempted. So a session is a preference
and never a reservation: admission counts its blocks as available.

- A session holds the full blocks of its latest turn, prompt and output, or only their head when
  they exceed the bound of one session: the next turn can reuse the head.
- It is renewed by every turn, when the turn is submitted and when it ends. It expires `ttl_s` after
  the last renewal: its blocks return to their level without a session.
- While all sessions together hold more than `max_num_blocks`, the least recently used one expires.
  A block that two sessions hold counts once and is held while one of them remains.
- While the sessions of one tenant hold more than `max_num_of_tenant`, its oldest expires: otherwise
  a tenant with a new session per request would take the whole cache. Shared blocks count for each
  session. A tenant without a name is the only tenant and has no bound.
- A block that is evicted is lost to its sessions; a session without blocks is dropped.

There are never more sessions than held blocks, so the account is bounded by the pool.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from penstock.scheduler.check_pieces import Faults, is_sorted, pieces
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.executor import ExecutorInfo
from penstock.scheduler.request import RequestSpec

SessionKey: TypeAlias = tuple[str, str, bytes]
"""Tenant, session id, hash salt: keys that differ in one of them share no session."""


@dataclass(slots=True, eq=False)
class _Session:
    """`turn`: the request that left these blocks; `blocks`: in order of the conversation."""

    key: SessionKey
    turn: int
    until_s: float
    blocks: dict[int, None]


class Sessions:
    """The sessions over one pool.

    `level`: the level of held blocks. `max_num_blocks` bounds the blocks of all sessions together,
    `max_num_of_tenant` those of each named tenant (None: no bound), `max_num_each` those of one
    session.
    """

    def __init__(
        self,
        *,
        level: int,
        ttl_s: float,
        max_num_blocks: int,
        max_num_each: int,
        max_num_of_tenant: int | None = None,
    ) -> None:
        self.level = level
        self._ttl_s = ttl_s
        self._max_num_blocks = max_num_blocks
        self._max_num_each = min(max_num_each, max_num_blocks)
        # Least recently used first; all have the same time to live, so this is also the order of
        # expiry.
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()
        self._holders: dict[int, set[_Session]] = {}
        self._max_num_of_tenant = max_num_of_tenant
        # Number of blocks by tenant, and its sessions in the same order as `_sessions`.
        self._num_of: dict[str, int] = {}
        self._keys_of: dict[str, OrderedDict[SessionKey, None]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, block: int) -> bool:
        return block in self._holders

    def hold(self, key: SessionKey, turn: int, blocks: Sequence[int], now: float) -> list[int]:
        """Hold the blocks of an ended turn in place of those of the previous turn.

        Several outputs of one turn (the same `turn`) are held together, up to the bound of one
        session. Return the blocks that became held or are not held any more.
        """
        session = self._take(key) or _Session(key, turn, 0.0, {})
        before, holders = session.blocks, self._holders
        wanted = dict.fromkeys((*before, *blocks) if session.turn == turn else blocks)
        while len(wanted) > self._max_num_each:
            wanted.popitem()
        changed: list[int] = []
        for block in wanted:
            there = holders.get(block)
            if there is None:
                holders[block] = {session}
                changed.append(block)
            else:
                there.add(session)
        changed += [b for b in before if b not in wanted and self._release(session, b)]
        session.turn, session.until_s, session.blocks = turn, now + self._ttl_s, wanted
        if wanted:
            self._put(session)
        changed += self._keep_share(key[0])
        while len(self._holders) > self._max_num_blocks:
            changed += self._lapse()
        return changed

    def renew(self, key: SessionKey, now: float) -> None:
        """Extend a session whose next turn was submitted."""
        session = self._sessions.get(key)
        if session is not None:
            session.until_s = now + self._ttl_s
            self._sessions.move_to_end(key)
            self._keys_of[key[0]].move_to_end(key)

    def expire(self, now: float) -> list[int]:
        """Expire sessions; return the blocks that are not held any more."""
        freed: list[int] = []
        while self._sessions and next(iter(self._sessions.values())).until_s <= now:
            freed += self._lapse()
        return freed

    def lose(self, block: int) -> None:
        """Remove a block that lost its content from its sessions."""
        for session in self._holders.pop(block, ()):
            del session.blocks[block]
            self._num_of[session.key[0]] -= 1
            if not session.blocks:
                self._take(session.key)

    def faults(self) -> Faults:
        """Yield the inconsistencies of the account, piece by piece."""
        for named in pieces(self._sessions.items()):
            if any(session.key != key for key, session in named):
                yield "a session is filed under another name"
            if any(not 0 < len(session.blocks) <= self._max_num_each for _, session in named):
                yield "a session holds nothing or too much"
            yield ""
        num_held = 0
        for held in pieces((b, one) for one in self._sessions.values() for b in one.blocks):
            num_held += len(held)
            if any(session not in self._holders.get(block, ()) for block, session in held):
                yield "sessions and held blocks disagree"
            yield ""
        for holders in pieces(self._holders.values()):
            num_held -= sum(map(len, holders))
            yield "" if all(holders) else "sessions and held blocks disagree"
        if num_held:
            yield "sessions and held blocks disagree"
        if len(self._holders) > self._max_num_blocks:
            yield "sessions hold more than they may together"
        yield self._fault_of_tenants()
        for is_in_order in is_sorted(session.until_s for session in self._sessions.values()):
            yield "" if is_in_order else "sessions are out of order"

    def _fault_of_tenants(self) -> str:
        most = self._max_num_of_tenant
        if most is not None and any(num > most for name, num in self._num_of.items() if name):
            return "a tenant's sessions hold more than they may"
        counted = dict.fromkeys(self._keys_of, 0)
        for key, session in self._sessions.items():
            counted[key[0]] += len(session.blocks)
        return "" if counted == self._num_of else "blocks of a tenant's sessions are miscounted"

    def _lapse(self) -> list[int]:
        """Expire the least recently used session; return the blocks that are not held any more."""
        return self._let_go(next(iter(self._sessions)))

    def _keep_share(self, tenant: str) -> list[int]:
        """Expire a tenant's oldest sessions beyond its share; if only one is left, shorten its
        tail.
        """
        most = self._max_num_of_tenant
        if most is None or not tenant:
            return []
        freed: list[int] = []
        while self._num_of.get(tenant, 0) > most and len(self._keys_of[tenant]) > 1:
            freed += self._let_go(next(iter(self._keys_of[tenant])))
        while self._num_of.get(tenant, 0) > most:
            session = self._sessions[next(iter(self._keys_of[tenant]))]
            block, _ = session.blocks.popitem()
            self._num_of[tenant] -= 1
            if self._release(session, block):
                freed.append(block)
            if not session.blocks:
                self._take(session.key)
        return freed

    def _let_go(self, key: SessionKey) -> list[int]:
        session = self._take(key)
        assert session is not None
        return [block for block in session.blocks if self._release(session, block)]

    def _put(self, session: _Session) -> None:
        tenant = session.key[0]
        self._sessions[session.key] = session
        self._num_of[tenant] = self._num_of.get(tenant, 0) + len(session.blocks)
        self._keys_of.setdefault(tenant, OrderedDict())[session.key] = None

    def _take(self, key: SessionKey) -> _Session | None:
        session = self._sessions.pop(key, None)
        if session is not None:
            tenant = key[0]
            self._num_of[tenant] -= len(session.blocks)
            del self._keys_of[tenant][key]
            if not self._keys_of[tenant]:
                del self._keys_of[tenant], self._num_of[tenant]
        return session

    def _release(self, session: _Session, block: int) -> bool:
        """Remove a holder of the block; return whether no session holds it any more."""
        holders = self._holders[block]
        if len(holders) == 1:
            del self._holders[block]
            return True
        holders.discard(session)
        return False


def sessions_of(config: SchedulerConfig, info: ExecutorInfo) -> Sessions:
    """Return the sessions that `config` allows over the pool of an executor."""
    return Sessions(
        level=config.session_retention_level,
        ttl_s=config.session_ttl_s,
        max_num_blocks=max(1, int(config.max_session_share * info.num_blocks)),
        max_num_each=max(1, config.max_session_tokens // info.block_size),
        max_num_of_tenant=max(1, int(config.max_tenant_session_share * info.num_blocks)),
    )


def session_key(spec: RequestSpec) -> SessionKey | None:
    """Return the session of a request; None if it has none or leaves no blocks."""
    if not spec.session_id or not spec.hash_salt:
        return None
    return spec.tenant, spec.session_id, spec.hash_salt
