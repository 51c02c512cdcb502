"""Sessions keep the blocks of a conversation for its next turn (request).

Records which blocks each session holds and for how long, limits how many blocks all sessions may
hold, and reports whether a block is held.

A held block that is not used is cached like any other, at a higher retention level: it is evicted
after all blocks of lower levels, and before any running request is preempted. A session reserves
nothing: admission counts its blocks as available.

- A session holds the full blocks of its latest turn, prompt and output, or only their head when
  they exceed the bound of one session: the next turn can reuse the head.
- It is renewed by every turn, when the turn is submitted and when it ends. It expires `ttl_s` after
  the last renewal: its blocks revert to the level they would have without the session.
- While all sessions together hold more than `max_num_blocks`, the least recently used one expires.
  A block that two sessions hold counts once and is held while one of them remains.
- While the sessions of one tenant hold more than `max_num_of_tenant` blocks, the oldest of these
  sessions expires: otherwise a tenant with a new session per request would take the whole cache.
  Shared blocks count for each session. The tenant without a name has no bound, because it is the
  only tenant.
- A block that is evicted is removed from its sessions; a session without blocks is dropped.

There are never more sessions than held blocks, so their number is bounded by the pool.
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
"""Key of a session: tenant, session id, hash salt."""


@dataclass(slots=True, eq=False)
class _Session:
    """The blocks held for a session. `turn`: key of the request of the last turn; `until_s`: when
    it expires; `blocks`: in order of the conversation.
    """

    key: SessionKey
    turn: int
    until_s: float
    blocks: dict[int, None]


class Sessions:
    """The sessions over one pool.

    `level`: the retention level of held blocks. `ttl_s`: time to live, seconds. Maximum numbers of
    blocks: `max_num_blocks` of all sessions together, `max_num_of_tenant` of each named tenant
    (None: no bound), `max_num_each` of one session.
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
        # Least recently used first. All have the same time to live, so this is also the order of
        # expiry.
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()
        self._holders: dict[int, set[_Session]] = {}
        self._max_num_of_tenant = max_num_of_tenant
        # By tenant: the number of held blocks, and the sessions in the same order as in
        # `_sessions`.
        self._num_of: dict[str, int] = {}
        self._keys_of: dict[str, OrderedDict[SessionKey, None]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, block: int) -> bool:
        return block in self._holders

    def hold(self, key: SessionKey, turn: int, blocks: Sequence[int], now: float) -> list[int]:
        """Hold the blocks of an ended turn; no longer hold the blocks of the previous turn.

        `turn`: the key of the request (of its first output). The blocks of several outputs of one
        turn are held together, up to the bound of one session. Return the blocks that became held
        or are no longer held.
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
        changed += self._enforce_tenant_limit(key[0])
        while len(self._holders) > self._max_num_blocks:
            changed += self._expire_oldest()
        return changed

    def renew(self, key: SessionKey, now: float) -> None:
        """Restart the time to live of a session whose next turn was submitted; a no-op if it is
        unknown.
        """
        session = self._sessions.get(key)
        if session is not None:
            session.until_s = now + self._ttl_s
            self._sessions.move_to_end(key)
            self._keys_of[key[0]].move_to_end(key)

    def expire(self, now: float) -> list[int]:
        """End the sessions whose time to live has passed; return the blocks that are no longer
        held.
        """
        freed: list[int] = []
        while self._sessions and next(iter(self._sessions.values())).until_s <= now:
            freed += self._expire_oldest()
        return freed

    def remove_block(self, block: int) -> None:
        """Remove a block from all sessions, because it was evicted or its content is invalid."""
        for session in self._holders.pop(block, ()):
            del session.blocks[block]
            self._num_of[session.key[0]] -= 1
            if not session.blocks:
                self._take(session.key)

    def faults(self) -> Faults:
        """Check the sessions in small parts; yield each part's fault, or an empty string."""
        for named in pieces(self._sessions.items()):
            if any(session.key != key for key, session in named):
                yield "a session is stored under another key"
            if any(not 0 < len(session.blocks) <= self._max_num_each for _, session in named):
                yield "a session is empty or exceeds its bound"
            yield ""
        num_held = 0
        for held in pieces((b, one) for one in self._sessions.values() for b in one.blocks):
            num_held += len(held)
            if any(session not in self._holders.get(block, ()) for block, session in held):
                yield "sessions and held blocks are inconsistent"
            yield ""
        for holders in pieces(self._holders.values()):
            num_held -= sum(map(len, holders))
            yield "" if all(holders) else "sessions and held blocks are inconsistent"
        if num_held:
            yield "sessions and held blocks are inconsistent"
        if len(self._holders) > self._max_num_blocks:
            yield "all sessions together exceed their bound"
        yield self._fault_of_tenants()
        for is_in_order in is_sorted(session.until_s for session in self._sessions.values()):
            yield "" if is_in_order else "sessions are out of order"

    def _fault_of_tenants(self) -> str:
        most = self._max_num_of_tenant
        if most is not None and any(num > most for name, num in self._num_of.items() if name):
            return "a tenant's sessions exceed the tenant's bound"
        counted = dict.fromkeys(self._keys_of, 0)
        for key, session in self._sessions.items():
            counted[key[0]] += len(session.blocks)
        return "" if counted == self._num_of else "blocks of a tenant's sessions are miscounted"

    def _expire_oldest(self) -> list[int]:
        """Expire the least recently used session; return the blocks that are no longer held."""
        return self._remove(next(iter(self._sessions)))

    def _enforce_tenant_limit(self, tenant: str) -> list[int]:
        """While a tenant's sessions hold too many blocks, expire the oldest; return the blocks that
        are no longer held.

        The newest session only loses its last blocks; it expires if none are left.
        """
        most = self._max_num_of_tenant
        if most is None or not tenant:
            return []
        freed: list[int] = []
        while self._num_of.get(tenant, 0) > most and len(self._keys_of[tenant]) > 1:
            freed += self._remove(next(iter(self._keys_of[tenant])))
        while self._num_of.get(tenant, 0) > most:
            session = self._sessions[next(iter(self._keys_of[tenant]))]
            block, _ = session.blocks.popitem()
            self._num_of[tenant] -= 1
            if self._release(session, block):
                freed.append(block)
            if not session.blocks:
                self._take(session.key)
        return freed

    def _remove(self, key: SessionKey) -> list[int]:
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
        """Remove a session from the holders of a block; return True if it was the last holder."""
        holders = self._holders[block]
        if len(holders) == 1:
            del self._holders[block]
            return True
        holders.discard(session)
        return False


def sessions_of(config: SchedulerConfig, info: ExecutorInfo) -> Sessions:
    """Create the sessions for the pool of an executor, with the limits of `config`."""
    return Sessions(
        level=config.session_retention_level,
        ttl_s=config.session_ttl_s,
        max_num_blocks=max(1, int(config.max_session_share * info.num_blocks)),
        max_num_each=max(1, config.max_session_tokens // info.block_size),
        max_num_of_tenant=max(1, int(config.max_tenant_session_share * info.num_blocks)),
    )


def session_key(spec: RequestSpec) -> SessionKey | None:
    """Return the key of a request's session; None without a session, or without a salt, since its
    blocks are then not cached.
    """
    if not spec.session_id or not spec.hash_salt:
        return None
    return spec.tenant, spec.session_id, spec.hash_salt
