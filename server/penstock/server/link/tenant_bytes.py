"""The bytes of each tenant in a memory shared by all.

Owns the rule of who gives way when it is full: the tenant that has most, so that no tenant loses
anything to others as long as it has no more than an equal share.
"""


class TenantBytes:
    """Bytes by tenant. `total`: of all."""

    __slots__ = ("_by_tenant", "total")

    def __init__(self) -> None:
        self._by_tenant: dict[str, int] = {}
        self.total = 0

    def add(self, tenant: str, num_bytes: int) -> None:
        """`num_bytes` may be negative."""
        self.total += num_bytes
        num_bytes += self._by_tenant.pop(tenant, 0)
        if num_bytes:
            self._by_tenant[tenant] = num_bytes

    @property
    def largest(self) -> str:
        """The tenant that has most. Raises ValueError if there is none."""
        return max(self._by_tenant, key=self._by_tenant.__getitem__)
