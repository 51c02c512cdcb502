"""How a failure that the engine reports is told to the client.

Owns the one mapping from the scheduler's reasons to the contract's.
"""

from penstock.scheduler.request import FailureReason
from penstock.server.front.errors import ErrorReason, FieldViolation, Refusal
from penstock.server.front.phases import PhaseClock

_REASONS: dict[FailureReason, ErrorReason] = {
    FailureReason.QUEUE_FULL: ErrorReason.QUEUE_FULL,
    FailureReason.REQUEST_ID_IN_USE: ErrorReason.REQUEST_ID_IN_USE,
    FailureReason.EXCEEDS_KV_CACHE: ErrorReason.EXCEEDS_KV_CACHE,
    FailureReason.PROMPT_TOO_LONG: ErrorReason.PROMPT_TOO_LONG,
    FailureReason.TTFT_DEADLINE_EXCEEDED: ErrorReason.DEADLINE_EXCEEDED,
    FailureReason.DEADLINE_EXCEEDED: ErrorReason.DEADLINE_EXCEEDED,
    FailureReason.EXECUTOR_REQUEST_FAILED: ErrorReason.EXECUTOR_REQUEST_FAILED,
    FailureReason.EXECUTOR_REFUSED: ErrorReason.EXECUTOR_REFUSED,
    FailureReason.ENGINE_DOWN: ErrorReason.ENGINE_DOWN,
    FailureReason.DRAINING: ErrorReason.DRAINING,
    FailureReason.TENANT_OVER_QUOTA: ErrorReason.QUOTA_EXCEEDED,
}


def refusal_for(
    reason: FailureReason, *, phases: PhaseClock, prompt_path: str, deadline_kind: str
) -> Refusal:
    """What the client is told when the engine ends a request with `reason`."""
    metadata: dict[str, str] = {}
    violations: tuple[FieldViolation, ...] = ()
    if reason in (FailureReason.DEADLINE_EXCEEDED, FailureReason.TTFT_DEADLINE_EXCEEDED):
        is_ttft = reason is FailureReason.TTFT_DEADLINE_EXCEEDED
        metadata = {
            "state": phases.state.name,
            "phase": phases.phase.value,
            "deadline": "ttft" if is_ttft else deadline_kind,
        }
    elif reason is FailureReason.PROMPT_TOO_LONG:
        violations = (FieldViolation(path=prompt_path, description="exceeds the context"),)
    elif reason is FailureReason.EXCEEDS_KV_CACHE:
        violations = (
            FieldViolation(path="stopping.max_tokens", description="exceeds the KV cache"),
        )
    return Refusal(reason=_REASONS[reason], metadata=metadata, violations=violations)
