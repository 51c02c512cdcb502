"""Settings of observability: tracing, flight recorder, operator ports. Reads no environment.

Raises SettingError naming the field.
"""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from penstock.scheduler.setting import SettingError, check, setting

MAX_METRICS_TENANTS = 256
OTHER_TENANTS = "other"
"""The label value for all tenants that are not listed."""
_SCHEMES = ("http://", "https://")
MIN_FLIGHT_STEPS, MAX_FLIGHT_STEPS = 64, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Which requests are traced. The `OTEL_*` variables configure the export.

    `is_on`: whether an exporter is configured. `has_next_rpc_keys`: also write the RPC keys of the
    next release of the conventions. Traces of requests that failed, were replayed or preempted,
    whose TTFT exceeds `slow_ttft_s` or whose duration exceeds `slow_s` are always kept, whatever
    the ratio and the parent's decision.
    """

    is_on: bool = False
    otlp_endpoint: str | None = setting(
        None,
        "observability",
        "collector that traces go to, in place of OTEL_EXPORTER_OTLP_ENDPOINT and"
        " OTEL_EXPORTER_OTLP_TRACES_ENDPOINT; the other OTEL_ variables hold as they are",
        metavar="URL",
        is_everyday=True,
        shown="no traces",
    )
    slow_ttft_s: float | None = setting(
        None,
        "observability",
        "seconds to a first token beyond which a trace is always kept",
        name="trace_slow_ttft_s",
        above=0,
        shown="no limit",
    )
    slow_s: float | None = setting(
        None,
        "observability",
        "seconds of a whole request beyond which a trace is always kept",
        name="trace_slow_s",
        above=0,
        shown="no limit",
    )
    has_content: bool = setting(
        False,
        "observability",
        "whether prompts and outputs go into the traces",
        name="trace_content",
    )
    has_next_rpc_keys: bool = False

    def __post_init__(self) -> None:
        if self.otlp_endpoint is not None:
            _check_url(self.otlp_endpoint)
        check(self)


def _check_url(url: str) -> None:
    """Raise SettingError for an invalid URL."""
    wanted = "must begin with http:// or https://"
    if url.startswith(_SCHEMES):
        wanted = "must have a host, and a port from 1 to 65535 where it has one"
        try:
            parts = urlsplit(url)
            if parts.hostname and parts.port != 0:
                return
        except ValueError:
            pass
    raise SettingError(f"{{}} {wanted}, not {url!r}", "otlp_endpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightConfig:
    """Settings of the flight recorder: number of kept steps (a power of two), folder of files."""

    num_steps: int = setting(
        4096,
        "observability",
        "steps that the flight recorder keeps, a power of two in"
        f" {MIN_FLIGHT_STEPS}..{MAX_FLIGHT_STEPS}",
        name="flight_steps",
    )
    folder: Path | None = setting(
        None,
        "observability",
        "where flight records are written when the engine dies, on SIGUSR1 and on request",
        name="flight_folder",
        metavar="DIR",
        shown="penstock-flight-<uid> among the temporary files",
    )

    def __post_init__(self) -> None:
        is_power = self.num_steps & (self.num_steps - 1) == 0
        if not (MIN_FLIGHT_STEPS <= self.num_steps <= MAX_FLIGHT_STEPS and is_power):
            raise SettingError(
                f"{{}} must be a power of two in {MIN_FLIGHT_STEPS}..{MAX_FLIGHT_STEPS},"
                f" not {self.num_steps}",
                "num_steps",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverConfig:
    """Settings of the observer process. Ports: None for no port, 0 for any free one.

    Each tenant in `metrics_tenants` adds a few series.
    """

    operations_port: int | None = setting(
        None,
        "observability",
        "port of the operations service, 0 for any free one",
        at_least=0,
        at_most=65535,
        may_be_off=True,
        is_everyday=True,
        shown="the port + 1, any free one where that is 0",
    )
    metrics_port: int | None = setting(
        None,
        "observability",
        "port of Prometheus metrics and the status page",
        at_least=0,
        at_most=65535,
        may_be_off=True,
        is_everyday=True,
        shown="the port + 2, any free one where that is 0",
    )
    operations_host: str = setting(
        "127.0.0.1", "observability", "address that operators connect to, on both ports"
    )
    metrics_tenants: tuple[str, ...] = setting(
        (),
        "observability",
        "tenants with metrics of their name; all others are one",
        shown="no metrics of tenants",
    )
    tracing: TracingConfig = field(default_factory=TracingConfig)
    flight: FlightConfig = field(default_factory=FlightConfig)

    def __post_init__(self) -> None:
        check(self)
        if not self.operations_host:
            raise SettingError("{} must not be empty", "operations_host")
        self._check_tenants()

    def _check_tenants(self) -> None:
        names, fault = self.metrics_tenants, ""
        if len(names) > MAX_METRICS_TENANTS:
            fault = f"be at most {MAX_METRICS_TENANTS}, not {len(names)}"
        elif "" in names:
            fault = "not hold an empty name"
        elif len(set(names)) < len(names):
            fault = "not name one twice"
        elif OTHER_TENANTS in names:
            fault = f"not hold {OTHER_TENANTS!r}: that is the rest"
        if fault:
            raise SettingError(f"{{}} must {fault}", "metrics_tenants")

    @property
    def is_needed(self) -> bool:
        """Whether the service needs an observer process."""
        return (
            self.metrics_port is not None or self.operations_port is not None or self.tracing.is_on
        )
