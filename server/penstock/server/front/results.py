"""Results of ended requests that may still be resumed, for the next engine to keep.

Owns the bound on them, which is each front's own: the engine drops a stream that outgrows its
memory silently, as long as it is read. Contains outputs: never log it.
"""

from collections.abc import Iterator
from typing import Final

from penstock.server.link.resume_frames import KeptRequest
from penstock.server.link.tenant_bytes import TenantBytes

_RESULT_BYTES: Final = 1536
_TOKEN_BYTES: Final = 12


class Results:
    """Results by the engine's names, as long as the engine keeps them.

    `max_bytes`: of all. Beyond, the oldest of the tenant that has most go: the death of the engine
    is the end of these.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_name: dict[str, KeptRequest] = {}
        self._names: dict[str, dict[str, None]] = {}  # by tenant, each the oldest first
        self._bytes = TenantBytes()

    @property
    def num_bytes(self) -> int:
        """Of all."""
        return self._bytes.total

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[KeptRequest]:
        """The oldest first."""
        return iter(tuple(self._by_name.values()))

    def add(self, result: KeptRequest) -> None:
        """Add one; replaces an earlier one of its name."""
        self._remove(result.name)
        self._by_name[result.name] = result
        self._names.setdefault(result.tenant, {})[result.name] = None
        self._bytes.add(result.tenant, _size_of(result))
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._names[self._bytes.largest])))

    def forget(self, name: str, keys: tuple[int, ...]) -> None:
        """The engine has dropped the request with these keys."""
        result = self._by_name.get(name)
        if result is not None and result.keys == keys:
            self._remove(name)

    def _remove(self, name: str) -> None:
        result = self._by_name.pop(name, None)
        if result is None:
            return
        self._bytes.add(result.tenant, -_size_of(result))
        names = self._names[result.tenant]
        del names[name]
        if not names:
            del self._names[result.tenant]


def _size_of(result: KeptRequest) -> int:
    num_tokens = 0 if result.history is None else len(result.history.tokens)
    return _RESULT_BYTES + len(result.resume_spec.message) + num_tokens * _TOKEN_BYTES
