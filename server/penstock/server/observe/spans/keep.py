"""Which traces are kept whatever the sampling ratio. Decided at a request's end, when all is known.

Pure. The sampler of the SDK decides on all others.
"""

import enum
import math

from penstock.server.observe.config import TracingConfig
from penstock.server.observe.request_record import RequestRecord
from penstock.server.observe.spans.status import is_server_error


class KeepReason(enum.StrEnum):
    """Why a trace was kept: the values of `penstock.sampling.reason`."""

    ERROR = "error"
    SLOW = "slow"
    PREEMPTED = "preempted"
    REPLAYED = "replayed"
    """Its engine died under it."""
    PARENT = "parent"
    """The caller's decision, as the SDK's sampler honours it."""
    SAMPLER = "sampler"
    """The SDK's sampler's own decision."""


def reason_to_keep(record: RequestRecord, config: TracingConfig) -> KeepReason | None:
    """Why this request must be kept; None: let the sampler decide."""
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
    # One that ended without a first token waited for it until its end.
    first_s = record.ttft_s if math.isfinite(record.ttft_s) else whole_s
    return (config.slow_s is not None and whole_s > config.slow_s) or (
        config.slow_ttft_s is not None and first_s > config.slow_ttft_s
    )
