"""Converts a verdict to an event.

Owns the event of a request's end in ERROR. Does not know the cause of the verdict.
"""

from penstock.scheduler.events import Failed, Stay, Wait
from penstock.scheduler.outlook import Verdict
from penstock.scheduler.request import RequestSpec


def failed(
    spec: RequestSpec,
    now: float,
    verdict: Verdict,
    *,
    detail: str = "",
    wait: Wait | None = None,
    stay: Stay | None = None,
) -> Failed:
    """The end of a request at `now`; its ids are added to an executor's error."""
    return Failed(
        key=spec.key,
        at_s=now,
        reason=verdict.reason,
        request_id=spec.request_id if detail else "",
        trace_id=spec.trace_id if detail else b"",
        detail=detail,
        estimate_s=verdict.estimate_s,
        deadline_s=verdict.deadline_s,
        chance=verdict.chance,
        retry_after_s=verdict.retry_after_s,
        breach=verdict.breach,
        wait=wait,
        stay=stay,
    )
