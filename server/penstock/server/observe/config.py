"""Settings of observability: tracing, the flight recorder (a record of the engine's last steps in
shared memory), and the ports for operators.

Reads no environment variables. An invalid value raises SettingError, which names the field.
"""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from penstock.conventions import DEFAULT_HOST, MAX_PORT, METRICS_OFFSET, OPERATIONS_OFFSET
from penstock.scheduler.setting import SettingError, check, setting

MAX_METRICS_TENANTS = 256
OTHER_TENANTS = "other"
"""The label value that all unlisted tenants share."""
_SCHEMES = ("http://", "https://")
MIN_FLIGHT_STEPS, MAX_FLIGHT_STEPS = 64, 1 << 20
DEFAULT_MAX_RECORD_BYTES = 256 * 1024 * 1024
"""Default size limit of each of the two files of a recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Settings of tracing. The `OTEL_*` variables configure the export.

    `is_on` is True if traces are exported. If `has_next_rpc_keys`, spans also have the RPC
    attributes of the next release of the OpenTelemetry semantic conventions.

    The traces of some requests are always kept, regardless of the sampling ratio and the sampling
    decision of the caller. These requests ended with a server error, were replayed after an engine
    crash, were preempted, had a TTFT (time to first token) above `slow_ttft_s`, or had a duration
    above `slow_s`.
    """

    is_on: bool = False
    otlp_endpoint: str | None = setting(
        None,
        "observability",
        "collector to which traces are sent, instead of OTEL_EXPORTER_OTLP_ENDPOINT and"
        " OTEL_EXPORTER_OTLP_TRACES_ENDPOINT; other OTEL_ variables still apply",
        metavar="URL",
        is_everyday=True,
        shown="no traces",
    )
    slow_ttft_s: float | None = setting(
        None,
        "observability",
        "time to first token, in seconds, above which a trace is always kept",
        name="trace_slow_ttft_s",
        above=0,
        shown="no limit",
    )
    slow_s: float | None = setting(
        None,
        "observability",
        "duration of a request, in seconds, above which a trace is always kept",
        name="trace_slow_s",
        above=0,
        shown="no limit",
    )
    has_content: bool = setting(
        False,
        "observability",
        "whether traces contain prompts and outputs",
        name="trace_content",
    )
    has_next_rpc_keys: bool = False

    def __post_init__(self) -> None:
        if self.otlp_endpoint is not None:
            _check_url(self.otlp_endpoint)
        check(self)


def _check_url(url: str) -> None:
    """Raise SettingError unless `url` has the scheme http or https, a host, and a port from 1 to
    65535 if it has a port."""
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
    """Settings of the flight recorder: the number of steps that it keeps (a power of two), and the
    folder of the files that it writes. An invalid number of steps raises SettingError."""

    num_steps: int = setting(
        4096,
        "observability",
        "steps that the flight recorder keeps, a power of two",
        name="flight_steps",
        at_least=MIN_FLIGHT_STEPS,
        at_most=MAX_FLIGHT_STEPS,
    )
    folder: Path | None = setting(
        None,
        "observability",
        "folder of flight records, written when the engine dies, on SIGUSR1 and on request",
        name="flight_folder",
        metavar="DIR",
        shown="penstock-flight-<uid> in the temporary folder",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.num_steps & (self.num_steps - 1):
            raise SettingError(f"{{}} must be a power of two, not {self.num_steps}", "num_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverConfig:
    """Settings of the observer process; it exports metrics and traces.

    If a port is None, it is not opened; if it is 0, any free port is used. Each tenant in
    `metrics_tenants` adds a few time series. An invalid value raises SettingError, which names the
    field.
    """

    operations_port: int | None = setting(
        None,
        "observability",
        "port of the operations service, 0 for any free one",
        at_least=0,
        at_most=MAX_PORT,
        may_be_off=True,
        is_everyday=True,
        shown=f"the port + {OPERATIONS_OFFSET}; any free port if the port is 0",
    )
    metrics_port: int | None = setting(
        None,
        "observability",
        "port of Prometheus metrics and the status page",
        at_least=0,
        at_most=MAX_PORT,
        may_be_off=True,
        is_everyday=True,
        shown=f"the port + {METRICS_OFFSET}; any free port if the port is 0",
    )
    operations_host: str = setting(
        DEFAULT_HOST, "observability", "address that operators connect to, on both ports"
    )
    metrics_tenants: tuple[str, ...] = setting(
        (),
        "observability",
        "tenants with separate metrics; all others share one label",
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
            fault = "not contain an empty name"
        elif len(set(names)) < len(names):
            fault = "not contain a name twice"
        elif OTHER_TENANTS in names:
            fault = f"not contain {OTHER_TENANTS!r}, the label of all other tenants"
        if fault:
            raise SettingError(f"{{}} must {fault}", "metrics_tenants")

    @property
    def is_needed(self) -> bool:
        """True if the service needs an observer process."""
        return (
            self.metrics_port is not None or self.operations_port is not None or self.tracing.is_on
        )
