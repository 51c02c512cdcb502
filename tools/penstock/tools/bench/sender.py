"""Sends requests through the client, over the connections of one process.

Also decides which addresses are on this machine.
"""

import ipaddress
import math
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from penstock.client.channel import ChannelConfig, grpc_target
from penstock.client.client import Client
from penstock.client.credentials import TlsConfig, token_from
from penstock.client.events import Event
from penstock.client.prompt import TokenPrompt
from penstock.client.retry import NO_RETRY
from penstock.scheduler.setting import check, setting
from penstock.tools.bench.plan import LoadPlan
from penstock.tools.bench.schedule import PlannedRequest

_LOCAL_SCHEMES = ("unix", "unix-abstract")
_HOST = re.compile(r"\[(?P<ipv6>[^\]]*)\](:\d+)?|(?P<host>[^:]*)(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderConfig:
    """The settings of the connections to the service. They are sent to other processes, so they
    must not contain a secret, only the path of the token file.

    `is_multiplex`: all requests of a connection share one stream. `tls` None: plain text.
    `server_name`: the name expected in the server's certificate; None: the host name in the
    address.
    """

    address: str
    is_multiplex: bool = False
    num_channels: int = setting(
        1, "service", "number of connections per process", name="channels", at_least=1, at_most=1024
    )
    tls: TlsConfig | None = None
    server_name: str | None = None
    token_file: Path | None = None

    def client_options(self) -> dict[str, Any]:
        """Return the keyword arguments for a `Client` with these settings, except the address, the
        pool and multiplexing.
        """
        return {
            "tls": False if self.tls is None else self.tls,
            "token": None if self.token_file is None else token_from(self.token_file),
            "channel": ChannelConfig(server_name=self.server_name),
        }

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, if one is invalid."""
        grpc_target(self.address)
        check(self)


class ClientSender:
    """Sends requests through the client, without retries, because retries would hide failures."""

    def __init__(self, config: SenderConfig) -> None:
        options: dict[str, Any] = {"retry": NO_RETRY, **config.client_options()}
        if config.is_multiplex:
            options["multiplex"] = True
        if config.num_channels > 1:
            from penstock.client.pool import PoolConfig

            options["pool"] = PoolConfig(num_channels=config.num_channels)
        self._client = Client(config.address, **options)
        self._plan: LoadPlan | None = None

    def set_plan(self, plan: LoadPlan) -> None:
        """Set the plan that gives `generate` the model, the tenant and the deadline."""
        self._plan = plan

    async def connect(self, deadline_s: float) -> None:
        """Connect to the service and call its health method. Raises PenstockError."""
        await self._client.health(deadline_s=deadline_s)

    def generate(
        self, request: PlannedRequest, token_ids: list[int]
    ) -> AsyncGenerator[Event, None]:
        """Send a planned request with this prompt; return the events of its stream. Iteration
        raises PenstockError.
        """
        plan, row = self._plan, request.row
        assert plan is not None
        tenant = row.tenant or plan.tenant
        options: dict[str, Any] = {
            "max_tokens": row.num_output_tokens,
            "ignore_eos": True,
            "priority": row.priority or None,
            "ttft_timeout_s": _finite(row.ttft_deadline_s),
            "total_timeout_s": _finite(row.deadline_s),
            "model": plan.model,
        }
        return self._client.generate(
            TokenPrompt(ids=tuple(token_ids)),
            deadline_s=plan.deadline_s,
            metadata=((plan.tenant_metadata_key, tenant),) if tenant else (),
            **{name: value for name, value in options.items() if value is not None},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()


def is_local(address: str) -> bool:
    """Return whether all hosts of an address are on this machine: loopback, localhost, or a Unix
    socket.
    """
    target = grpc_target(address)
    scheme, has_scheme, rest = target.partition(":")
    if has_scheme and scheme in _LOCAL_SCHEMES:
        return True
    if has_scheme and scheme in ("ipv4", "ipv6", "dns"):
        # dns://AUTHORITY/HOST: the authority is a name server.
        target = rest.rpartition("/")[2]
    return all(_is_local_host(part) for part in target.split(","))


def _is_local_host(text: str) -> bool:
    parts = _HOST.fullmatch(text)
    if parts is None:
        return False
    host = parts["ipv6"] if parts["ipv6"] is not None else parts["host"]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _finite(value_s: float) -> float | None:
    return value_s if math.isfinite(value_s) else None
