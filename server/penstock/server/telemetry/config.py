"""What of a service may be looked at, and how. Owns the settings; reads no environment.

Raises ValueError naming the field.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

MAX_METRICS_TENANTS = 256
OTHER_TENANTS = "other"
"""How metrics call all tenants together that are not named."""
_SCHEMES = ("http://", "https://")
MIN_FLIGHT_STEPS, MAX_FLIGHT_STEPS = 64, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Which requests become traces. Where they go is said by the `OTEL_*` variables.

    `is_on`: whether there is anywhere for them to go. Kept whatever the ratio and whatever a
    parent decided: requests that failed or were preempted, whose first token took longer than
    `slow_ttft_s`, or that took longer than `slow_s` as a whole (None: no such limit).
    `has_content`: prompts and outputs go into the spans. `has_next_rpc_keys`: the RPC keys of the
    next release of the conventions are written too. `otlp_endpoint`: where an OTLP collector
    listens, in place of what OTEL_EXPORTER_OTLP_ENDPOINT says.
    """

    is_on: bool = False
    slow_ttft_s: float | None = None
    slow_s: float | None = None
    has_content: bool = False
    has_next_rpc_keys: bool = False
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(_SCHEMES):
            raise ValueError(
                f"otlp_endpoint must begin with http:// or https://, not {self.otlp_endpoint!r}"
            )
        for name in ("slow_ttft_s", "slow_s"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be above 0, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightConfig:
    """The flight recorder: how many steps are kept (a power of two), and where files go.

    `folder` None: a folder of this user's in the system's place for temporary files.
    """

    num_steps: int = 4096
    folder: Path | None = None

    def __post_init__(self) -> None:
        is_power = self.num_steps & (self.num_steps - 1) == 0
        if not (MIN_FLIGHT_STEPS <= self.num_steps <= MAX_FLIGHT_STEPS and is_power):
            raise ValueError(
                f"num_steps must be a power of two in {MIN_FLIGHT_STEPS}..{MAX_FLIGHT_STEPS},"
                f" not {self.num_steps}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverConfig:
    """The observer process. Ports: None for none, 0 for any free one.

    `metrics_port`: Prometheus and the status page, over HTTP. `operations_port`: the operations
    service, over gRPC. Both on `operations_host`, apart from where clients connect.
    `metrics_tenants`: those that metrics tell by name, each of which costs a handful of series; all
    others together are one. Empty: tenants are not told.
    """

    metrics_port: int | None = None
    operations_port: int | None = None
    operations_host: str = "127.0.0.1"
    metrics_tenants: tuple[str, ...] = ()
    tracing: TracingConfig = field(default_factory=TracingConfig)
    flight: FlightConfig = field(default_factory=FlightConfig)

    def __post_init__(self) -> None:
        for name in ("metrics_port", "operations_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ValueError(f"{name} must be in 0..65535, not {port}")
        if not self.operations_host:
            raise ValueError("operations_host must not be empty")
        self._check_tenants()

    def _check_tenants(self) -> None:
        names = self.metrics_tenants
        if len(names) > MAX_METRICS_TENANTS:
            raise ValueError(
                f"metrics_tenants must be at most {MAX_METRICS_TENANTS}, not {len(names)}"
            )
        if "" in names:
            raise ValueError("metrics_tenants must not hold an empty name")
        if len(set(names)) < len(names):
            raise ValueError("metrics_tenants must not name one twice")
        if OTHER_TENANTS in names:
            raise ValueError(f"metrics_tenants must not hold {OTHER_TENANTS!r}: that is the rest")

    @property
    def is_needed(self) -> bool:
        """Whether there is anything for an observer process to do."""
        return (
            self.metrics_port is not None or self.operations_port is not None or self.tracing.is_on
        )
