"""Decides which traces are kept, after their requests have ended.

Traces of some requests are always kept, such as those with a server error. For other requests the
SDK's sampler decides; `OTEL_TRACES_SAMPLER` selects it. This module contains these rules, and the
sampler that wraps the SDK's sampler.
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
    """Why a trace was kept. These are the values of the attribute `penstock.sampling.reason`."""

    ERROR = "error"
    SLOW = "slow"
    PREEMPTED = "preempted"
    REPLAYED = "replayed"
    """The engine died during the request."""
    PARENT = "parent"
    """The sampling decision of the caller, which the SDK's sampler followed."""
    SAMPLER = "sampler"
    """The decision of the SDK's sampler."""


def reason_to_keep(record: RequestRecord, config: TracingConfig) -> KeepReason | None:
    """Return the reason why the trace of this request must be kept; None to let the sampler
    decide."""
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
    duration_s = record.end_s - record.arrival_s
    # A request that ended without a first token waited for it until its end.
    ttft_s = record.ttft_s if math.isfinite(record.ttft_s) else duration_s
    return (config.slow_s is not None and duration_s > config.slow_s) or (
        config.slow_ttft_s is not None and ttft_s > config.slow_ttft_s
    )


logger = logging.getLogger(__name__)
_RATIO_SAMPLERS = ("traceidratio", "parentbased_traceidratio")


class KeepSampler(Sampler):
    """Keeps each local root span (without a parent, or with a remote one) that has the attribute
    SAMPLING_REASON. The sampler `inner` decides about other local root spans. If it keeps a span,
    the span gets the attribute with the reason PARENT or SAMPLER.

    Child spans have the decision of their local root, so `inner` is called at most once for each
    local root.
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
        """Return the decision for a local root span; for a child, the decision of its parent."""
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
        """Return the name of this sampler, with the description of the wrapped sampler."""
        return f"PenstockKeepSampler{{{self._inner.get_description()}}}"


def sampler_from(environment: Mapping[str, str]) -> Sampler:
    """Return the sampler configured by `OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG`.

    As in the SDK, samplers are found by their entry points `opentelemetry_traces_sampler`, and an
    invalid value is logged and replaced by the default: sampler `parentbased_always_on`, ratio 1.0.
    Raises TypeError for an entry point that is not a sampler.
    """
    name = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    if not name:
        return DEFAULT_ON
    text = environment.get("OTEL_TRACES_SAMPLER_ARG")
    found = next(iter(entry_points(group="opentelemetry_traces_sampler", name=name)), None)
    if found is None:
        logger.warning("OTEL_TRACES_SAMPLER: there is no sampler %r; all traces are kept", name)
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
    logger.warning("OTEL_TRACES_SAMPLER_ARG must be in 0..1, not %r; 1.0 is used", text)
    return 1.0


def _decision(parent: SpanContext) -> Decision:
    return Decision.RECORD_AND_SAMPLE if parent.trace_flags.sampled else Decision.DROP


def _state_of(parent: SpanContext) -> TraceState | None:
    return parent.trace_state if parent.is_valid else None
