"""Decides which traces are kept: required ones, and the SDK sampler's choice of the others.

Whether a trace must be kept is decided when its request has ended. Owns the sampler that wraps the
SDK's, and the choice of the wrapped one by `OTEL_TRACES_SAMPLER`.
"""

import enum
import logging
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, cast

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Decision, ParentBased, Sampler
from opentelemetry.sdk.trace.sampling import SamplingResult as Result
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes

from penstock.server.observe.config import TracingConfig
from penstock.server.observe.request_record import RequestRecord
from penstock.server.observe.spans.keys import SAMPLING_REASON
from penstock.server.observe.status_codes import is_server_error


class KeepReason(enum.StrEnum):
    """Why a trace was kept: the values of `penstock.sampling.reason`."""

    ERROR = "error"
    SLOW = "slow"
    PREEMPTED = "preempted"
    REPLAYED = "replayed"
    """The engine died during the request."""
    PARENT = "parent"
    """The caller's decision, followed by the SDK's sampler."""
    SAMPLER = "sampler"
    """The decision of the SDK's sampler."""


def reason_to_keep(record: RequestRecord, config: TracingConfig) -> KeepReason | None:
    """Return why this request's trace must be kept; None: let the sampler decide."""
    if is_server_error(record.code):
        return KeepReason.ERROR
    if record.num_replays:
        return KeepReason.REPLAYED
    if _is_slow(record, config):
        return KeepReason.SLOW
    if record.num_preemptions:
        return KeepReason.PREEMPTED
    return None


def _is_slow(record: RequestRecord, config: TracingConfig) -> bool:
    whole_s = record.end_s - record.arrival_s
    # A request that ended without a first token waited for it until its end.
    first_s = record.ttft_s if math.isfinite(record.ttft_s) else whole_s
    return (config.slow_s is not None and whole_s > config.slow_s) or (
        config.slow_ttft_s is not None and first_s > config.slow_ttft_s
    )


_logger = logging.getLogger(__name__)
_RATIO_SAMPLERS = ("traceidratio", "parentbased_traceidratio")


class KeepSampler(Sampler):
    """Keeps a root that has a reason to be kept; delegates all others to `inner`.

    Children follow their root: `inner` is called once per trace.
    """

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner
        self._reason = KeepReason.PARENT if isinstance(inner, ParentBased) else KeepReason.SAMPLER

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> Result:
        """Implement the SDK's `Sampler`."""
        parent = get_current_span(parent_context).get_span_context()
        if parent.is_valid and not parent.is_remote:
            return Result(_decision(parent), attributes, parent.trace_state)
        if attributes and SAMPLING_REASON in attributes:
            return Result(Decision.RECORD_AND_SAMPLE, attributes, _state_of(parent))
        result = self._inner.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )
        if result.decision is not Decision.RECORD_AND_SAMPLE:
            return result
        reason = self._reason if parent.is_valid else KeepReason.SAMPLER
        attributes = {**cast(Any, result).attributes, SAMPLING_REASON: reason.value}
        return Result(result.decision, attributes, result.trace_state)

    def get_description(self) -> str:
        """Return its name and that of the wrapped sampler."""
        return f"PenstockKeepSampler{{{self._inner.get_description()}}}"


def sampler_from(environment: Mapping[str, str]) -> Sampler:
    """Return the sampler configured by `OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG`.

    It is found by its entry point `opentelemetry_traces_sampler`, as by the SDK's configurator, so
    that installed ones work too. As in the SDK, an invalid value logs a warning and is replaced by
    the default: sampler `parentbased_always_on`, ratio 1.0.
    """
    name = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    if not name:
        return DEFAULT_ON
    text = environment.get("OTEL_TRACES_SAMPLER_ARG")
    found = next(iter(entry_points(group="opentelemetry_traces_sampler", name=name)), None)
    if found is None:
        _logger.warning("OTEL_TRACES_SAMPLER: there is no sampler %r; all traces are kept", name)
        return DEFAULT_ON
    sampler = found.load()(_ratio(text) if name in _RATIO_SAMPLERS else text)
    if not isinstance(sampler, Sampler):
        raise TypeError(f"OTEL_TRACES_SAMPLER: {name!r} makes no sampler")
    return sampler


def _ratio(text: str | None) -> float:
    try:
        ratio = float(text or "")
    except ValueError:
        ratio = -1.0
    if 0.0 <= ratio <= 1.0:
        return ratio
    _logger.warning("OTEL_TRACES_SAMPLER_ARG must be in 0..1, not %r; 1.0 is used", text)
    return 1.0


def _decision(parent: SpanContext) -> Decision:
    return Decision.RECORD_AND_SAMPLE if parent.trace_flags.sampled else Decision.DROP


def _state_of(parent: SpanContext) -> TraceState | None:
    return parent.trace_state if parent.is_valid else None
