"""Defines the permitted values of metric labels. The sets are limited, so that clients cannot
create an unlimited number of series.

Unknown values become `other` and absent values `none`, because Prometheus treats an empty label as
missing.
"""

from collections.abc import Collection
from typing import Final

from penstock.scheduler.events import WaitReason
from penstock.scheduler.request import FinishReason
from penstock.server.error_reason import ErrorReason
from penstock.server.observe.exporter import FULL, NO_OBSERVER
from penstock.server.observe.request_record import ENGINE_LOST, UNREADABLE
from penstock.server.observe.status_codes import STATUS_NAMES

OTHER: Final = "other"
NONE: Final = "none"

REASONS: Final = frozenset(reason.value for reason in ErrorReason)
FINISH_REASONS: Final = frozenset(reason.name for reason in FinishReason)
ADMISSION_REJECTIONS: Final = frozenset(
    reason.value
    for reason in (
        ErrorReason.QUEUE_FULL,
        ErrorReason.QUOTA_EXCEEDED,
        ErrorReason.DEADLINE_UNREACHABLE,
        ErrorReason.DRAINING,
        # Requests that arrive without an engine are rejected. Operations count the reason as
        # failed (`error_reason.REJECTIONS`), because it also ends requests whose engine died.
        ErrorReason.ENGINE_DOWN,
        ErrorReason.MODEL_NOT_READY,
        ErrorReason.EXCEEDS_KV_CACHE,
        ErrorReason.EXECUTOR_REJECTED,
    )
)
"""Reasons to reject a valid request because of the state, the capacity or the executor of the
service. `penstock_admission_rejected_total` counts rejections with these reasons."""
WAIT_REASONS: Final = (*(reason.name.lower() for reason in WaitReason), OTHER, ENGINE_LOST)
"""The reasons why requests wait in the queue.

`other`: no resource was short, but the next step was not planned yet. `engine_lost`: the engine had
died and was not replaced yet.
"""
OUTCOMES: Final = ("ok", "cancelled", "error")
DROP_REASONS: Final = frozenset((FULL, NO_OBSERVER, UNREADABLE, OTHER))
"""Reasons why records are dropped; each has a series from the start. Other reasons keep their
names, up to a total of MAX_DROP_REASONS names; the rest are counted as `other`."""
MAX_DROP_REASONS: Final = 16
TRACE_DROPS: Final = ("queue_full", "export", "closing", "unwritable")
"""Reasons why traces are dropped; each has a series from the start."""
TRACE_OUTCOMES: Final = ("kept", "sampled_out", "dropped")
SPAN_OUTCOMES: Final = ("exported", "dropped")


def label_of(text: str, allowed: Collection[str]) -> str:
    """Return `text` if it is one of `allowed`, "none" if it is empty, and "other" otherwise."""
    if not text:
        return NONE
    return text if text in allowed else OTHER


def code_name(code: int) -> str:
    """Return the name of a gRPC status code; "other" for other numbers."""
    return STATUS_NAMES[code] if 0 <= code < len(STATUS_NAMES) else OTHER


def outcome(code: int, finish_reason: str) -> str:
    """Return one of OUTCOMES, for a gRPC status code and a finish reason. A request that its client
    cancelled is not an error of the service."""
    cancelled = FinishReason.CANCELLED.name
    if STATUS_NAMES.index(cancelled) == code or (code == 0 and finish_reason == cancelled):
        return "cancelled"
    return "ok" if code == 0 else "error"
