"""What is to be sent: how requests come, how long they are, and the bounds of a run, as a value.

Owns the settings of one run and their limits. Does not draw anything and does not send.
"""

import enum
import math
from dataclasses import dataclass

from penstock.tools.bench.lengths import FixedLength, Lengths

MAX_RATE_PER_S = 1e6
MAX_CONCURRENCY = 100_000
MAX_DURATION_S = 86_400.0
MAX_REQUESTS = 100_000_000
DEFAULT_PROMPT_TOKENS = FixedLength(num_tokens=128)
DEFAULT_OUTPUT_TOKENS = FixedLength(num_tokens=64)
MAX_ROWS = 1_000_000
"""Of a trace, that are taken to every process."""


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError(f"{name} must be finite and positive, not {value:g}")


def _check_count(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ValueError(f"{name} must be in 1 .. {most}, not {value}")


class Arrivals(enum.StrEnum):
    """When requests are sent.

    Open loop, whatever the server does: POISSON, independent arrivals; CONSTANT, evenly spaced;
    REPLAY, the times of a trace. CLOSED: a fixed number at once, the next when one has ended.
    """

    POISSON = "poisson"
    CONSTANT = "constant"
    REPLAY = "replay"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace. Deadlines count from its arrival, None for none.

    `prefix_ids`: what the prompt has in common with others, one id for each started block of
    `prefix_block_tokens` tokens; equal ids of one tenant give equal tokens. Empty: nothing.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""
    priority: int = 0
    ttft_deadline_s: float | None = None
    total_deadline_s: float | None = None
    prefix_ids: tuple[int, ...] = ()
    prefix_block_tokens: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What makes a completed request good: its first token in time, and 99 % of its gaps."""

    ttft_s: float = 1.0
    itl_s: float = 0.1

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        for name in ("ttft_s", "itl_s"):
            _check_positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """One run. Raises ValueError naming the field that is off.

    `rate_per_s`: of POISSON and CONSTANT. `concurrency`: of CLOSED. `rows`: the trace of REPLAY;
    elsewhere, when there are any, lengths come from them in turn instead of the distributions.

    Requests that are due in the first `warm_up_s` seconds are sent and not counted; then it runs
    for `duration_s`, or until `max_requests` counted ones were sent; then `drain_s` are left for
    what is open. `max_in_flight`: what would be more at once, over all processes, is dropped and
    counted as dropped. `deadline_s` is each call's gRPC deadline. The same `seed` and `run_index`
    give the same requests, on any number of processes; prompts of another `run_index` differ, so
    that no run finds the prefixes of the one before it cached.
    """

    arrivals: Arrivals
    vocab_size: int
    rate_per_s: float | None = None
    concurrency: int | None = None
    rows: tuple[TraceRow, ...] = ()
    prompt_tokens: Lengths = DEFAULT_PROMPT_TOKENS
    output_tokens: Lengths = DEFAULT_OUTPUT_TOKENS
    warm_up_s: float = 5.0
    duration_s: float = 30.0
    max_requests: int | None = None
    drain_s: float = 60.0
    max_in_flight: int = 20_000
    deadline_s: float | None = 120.0
    targets: Targets = Targets()
    model: str | None = None
    tenant: str = ""
    tenant_metadata_key: str = ""
    seed: int = 0
    run_index: int = 0

    def __post_init__(self) -> None:
        self._check_arrivals()
        _check_positive("duration_s", self.duration_s)
        for name in ("warm_up_s", "drain_s"):
            value: float = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} must be finite and not negative, not {value:g}")
        if self.end_s + self.drain_s > MAX_DURATION_S:
            raise ValueError(f"warm_up_s + duration_s + drain_s must be at most {MAX_DURATION_S:g}")
        _check_count("vocab_size", self.vocab_size, 2**31)
        _check_count("max_in_flight", self.max_in_flight, MAX_CONCURRENCY)
        if self.max_requests is not None:
            _check_count("max_requests", self.max_requests, MAX_REQUESTS)
        if self.deadline_s is not None:
            _check_positive("deadline_s", self.deadline_s)
        if len(self.rows) > MAX_ROWS:
            raise ValueError(f"rows must be at most {MAX_ROWS}, not {len(self.rows)}")
        has_tenant = bool(self.tenant) or any(row.tenant for row in self.rows)
        if has_tenant and not self.tenant_metadata_key:
            raise ValueError("tenant_metadata_key must be given where there are tenants")

    def _check_arrivals(self) -> None:
        is_rate = self.arrivals in (Arrivals.POISSON, Arrivals.CONSTANT)
        if is_rate != (self.rate_per_s is not None):
            raise ValueError("rate_per_s must be given for poisson and constant, and only there")
        if (self.arrivals is Arrivals.CLOSED) != (self.concurrency is not None):
            raise ValueError("concurrency must be given for closed, and only there")
        if self.arrivals is Arrivals.REPLAY and not self.rows:
            raise ValueError("rows must not be empty for replay")
        if self.rate_per_s is not None and not 0.0 < self.rate_per_s <= MAX_RATE_PER_S:
            raise ValueError(
                f"rate_per_s must be in 0 .. {MAX_RATE_PER_S:g}, not {self.rate_per_s:g}"
            )
        if self.concurrency is not None:
            _check_count("concurrency", self.concurrency, MAX_CONCURRENCY)

    @property
    def is_open_loop(self) -> bool:
        """Whether requests come whatever the server does."""
        return self.arrivals is not Arrivals.CLOSED

    @property
    def end_s(self) -> float:
        """When sending ends, in seconds from the start."""
        return self.warm_up_s + self.duration_s

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that may be drawn."""
        if self.rows:
            return max(row.num_prompt_tokens for row in self.rows)
        return self.prompt_tokens.max_tokens

    @property
    def max_output_tokens(self) -> int:
        """The longest output that may be drawn."""
        if self.rows:
            return max(row.num_output_tokens for row in self.rows)
        return self.output_tokens.max_tokens

    @property
    def max_total_tokens(self) -> int:
        """The longest prompt and output of one request that may be drawn."""
        if self.rows:
            return max(row.num_prompt_tokens + row.num_output_tokens for row in self.rows)
        return self.max_prompt_tokens + self.max_output_tokens
