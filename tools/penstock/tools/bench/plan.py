"""Defines the options of a load test, and the plan of one run with its arrivals, lengths and
limits.
"""

import dataclasses
import enum
from dataclasses import dataclass, field

from penstock.scheduler.setting import SettingError, check, required, setting
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.bench.lengths import FixedLength, Lengths
from penstock.tools.targets import Targets

MAX_CONCURRENCY = 100_000
MAX_DURATION_S = 86_400.0
MAX_REQUESTS = 100_000_000
DEFAULT_PROMPT_TOKENS = FixedLength(num_tokens=128)
DEFAULT_OUTPUT_TOKENS = FixedLength(num_tokens=64)
MAX_POINTS = 64
MAX_ROWS = 1_000_000
"""Maximum number of requests taken from a trace; limited, because they are sent to every process.
"""


class Arrivals(enum.StrEnum):
    """The arrival process.

    Open loop, independent of the server: POISSON; CONSTANT (evenly spaced); REPLAY (the times of a
    trace). Closed loop: CLOSED (a fixed concurrency; a request is sent when another has ended).
    """

    POISSON = "poisson"
    CONSTANT = "constant"
    REPLAY = "replay"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options that are not part of one run's plan; each entry of `rates` or `concurrency` is
    one run. Raises SettingError, naming the field, if one has too many entries.
    """

    start_timeout_s: float = setting(
        600.0, "service", "with --own-service: start timeout, seconds", above=0
    )
    num_processes: int = setting(
        1, "service", "number of client processes", name="processes", at_least=1, at_most=256
    )
    rates: tuple[float, ...] = setting(
        (),
        "points",
        "open loop: requests per second; one run per value",
        metavar="R,...",
        shown="none",
        above=0,
        at_most=1e6,
    )
    concurrency: tuple[int, ...] = setting(
        (),
        "points",
        "closed loop: number of concurrent requests; one run per value",
        metavar="N,...",
        shown="none",
        at_least=1,
        at_most=MAX_CONCURRENCY,
    )
    arrivals: Arrivals = setting(
        Arrivals.POISSON, "load", "with --rates", choices=("poisson", "constant")
    )
    prompt_tokens: str = setting(
        "128", "load", "N, uniform:MIN:MAX or lognormal:MEAN:SIGMA:MAX", metavar="LENGTHS"
    )
    output_tokens: str = setting("64", "load", "same format", metavar="LENGTHS")

    def __post_init__(self) -> None:
        for name in ("rates", "concurrency"):
            if len(getattr(self, name)) > MAX_POINTS:
                raise SettingError(f"{{}} must be at most {MAX_POINTS} numbers", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The plan of one run. Raises ValueError, naming the field, if one is invalid.

    `rate_per_s` is set for POISSON and CONSTANT arrivals only, `concurrency` for CLOSED only.
    `rows`: the requests of the trace for REPLAY; with other arrivals, if given, their lengths are
    used instead of the distributions `prompt_tokens` and `output_tokens`.

    After the warm-up, requests are sent for `duration_s`, or until `max_requests` of them were
    sent. Requests still open are then awaited for at most `drain_s`. In an open loop, the warm-up
    is the first `warm_up_s` seconds of the run, in which requests are sent but not counted. The
    warm-up of a closed loop is a separate run, `warm_up()`, which ends before the measurement
    starts. In an open loop, a request that is due while `max_in_flight` are open is counted as
    dropped. `deadline_s` is each call's gRPC deadline.

    The same `seed`, `run_index` and `is_warm_up` give the same requests, on any number of
    processes. Another `run_index` or `is_warm_up` gives other prompts, so that a run has no cache
    hits on prompts of an earlier run.
    """

    arrivals: Arrivals
    vocab_size: int = required(at_least=1, at_most=2**31)
    rate_per_s: float | None = None
    concurrency: int | None = None
    rows: tuple[TraceRequest, ...] = ()
    prompt_tokens: Lengths = DEFAULT_PROMPT_TOKENS
    output_tokens: Lengths = DEFAULT_OUTPUT_TOKENS
    warm_up_s: float = setting(5.0, "load", "warm-up before measurements, seconds", at_least=0)
    duration_s: float = setting(30.0, "load", "duration of the measurement, seconds", above=0)
    max_requests: int | None = setting(
        None,
        "load",
        "end the run after N measured requests",
        name="requests",
        at_least=1,
        at_most=MAX_REQUESTS,
        shown="no limit",
    )
    drain_s: float = setting(
        60.0, "load", "maximum wait for open requests at the end, seconds", at_least=0
    )
    max_in_flight: int = setting(
        20_000,
        "load",
        "maximum concurrent requests of all processes together; further requests are not sent",
        at_least=1,
        at_most=MAX_CONCURRENCY,
    )
    deadline_s: float | None = setting(
        120.0, "load", "deadline of each call, seconds", above=0, at_most=MAX_DURATION_S
    )
    targets: Targets = field(default_factory=Targets)
    model: str | None = setting(None, "service", "name of the model", shown="the service's default")
    tenant: str = setting("", "service", "tenant of the requests", shown="none")
    tenant_metadata_key: str = setting(
        "",
        "service",
        "metadata key of the tenant",
        metavar="KEY",
        shown="none",
    )
    seed: int = setting(
        0,
        "load",
        "seed of the load; the same seed gives the same requests",
        shown="random; reported",
    )
    run_index: int = 0
    is_warm_up: bool = False

    def __post_init__(self) -> None:
        self._check_arrivals()
        check(self)
        if self.warm_up_s + self.duration_s + self.drain_s > MAX_DURATION_S:
            raise SettingError(
                f"{{}} + {{}} + {{}} must be at most {MAX_DURATION_S:g}",
                *("warm_up_s", "duration_s", "drain_s"),
            )
        if len(self.rows) > MAX_ROWS:
            raise ValueError(f"rows must be at most {MAX_ROWS}, not {len(self.rows)}")
        has_tenant = bool(self.tenant) or any(row.tenant for row in self.rows)
        if has_tenant and not self.tenant_metadata_key:
            raise SettingError("{} must be given where there are tenants", "tenant_metadata_key")

    def _check_arrivals(self) -> None:
        is_rate = self.arrivals in (Arrivals.POISSON, Arrivals.CONSTANT)
        if is_rate != (self.rate_per_s is not None):
            raise ValueError("rate_per_s must be given for poisson and constant arrivals only")
        if (self.arrivals is Arrivals.CLOSED) != (self.concurrency is not None):
            raise ValueError("concurrency must be given for closed loops only")
        if self.arrivals is Arrivals.REPLAY and not self.rows:
            raise ValueError("rows must not be empty for replay")

    @property
    def is_open_loop(self) -> bool:
        """Whether requests are sent at planned times, independent of the server."""
        return self.arrivals is not Arrivals.CLOSED

    @property
    def start_s(self) -> float:
        """When the measurement starts, in seconds from the start of the run."""
        return self.warm_up_s if self.is_open_loop else 0.0

    @property
    def end_s(self) -> float:
        """When sending ends at the latest, in seconds from the start of the run."""
        return self.start_s + self.duration_s

    def warm_up(self) -> "LoadPlan | None":
        """Return the plan of a closed loop's warm-up; None without one, and for an open loop."""
        if self.is_open_loop or not self.warm_up_s:
            return None
        return dataclasses.replace(
            self, warm_up_s=0.0, duration_s=self.warm_up_s, max_requests=None, is_warm_up=True
        )

    @property
    def max_prompt_tokens(self) -> int:
        """The largest number of prompt tokens of a request."""
        if self.rows:
            return max(row.num_prompt_tokens for row in self.rows)
        return self.prompt_tokens.max_tokens

    @property
    def max_output_tokens(self) -> int:
        """The largest number of output tokens of a request."""
        if self.rows:
            return max(row.num_output_tokens for row in self.rows)
        return self.output_tokens.max_tokens

    @property
    def max_total_tokens(self) -> int:
        """The largest number of prompt and output tokens together of a request."""
        if self.rows:
            return max(row.num_prompt_tokens + row.num_output_tokens for row in self.rows)
        return self.max_prompt_tokens + self.max_output_tokens
