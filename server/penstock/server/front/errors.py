"""Why a call fails: the contract's reasons, and the exception that carries them.

Owns the reason of each failure that the engine reports. Only the gRPC layer knows status codes
(`penstock.server.rpc.statuses`). A refusal must not contain prompt or output text: clients see it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from penstock.scheduler.events import Failed
from penstock.scheduler.quotas import QuotaBreach, QuotaKind
from penstock.scheduler.request import ConstraintKind, FailureReason
from penstock.server.error_reason import ErrorReason as ErrorReason
from penstock.server.front.generation import Generation
from penstock.server.front.phases import PhaseClock

NO_METADATA: Mapping[str, str] = {}
_REASONS: dict[FailureReason, ErrorReason] = {
    FailureReason.QUEUE_FULL: ErrorReason.QUEUE_FULL,
    FailureReason.REQUEST_ID_IN_USE: ErrorReason.REQUEST_ID_IN_USE,
    FailureReason.EXCEEDS_KV_CACHE: ErrorReason.EXCEEDS_KV_CACHE,
    FailureReason.PROMPT_TOO_LONG: ErrorReason.PROMPT_TOO_LONG,
    FailureReason.TTFT_DEADLINE_EXCEEDED: ErrorReason.DEADLINE_EXCEEDED,
    FailureReason.DEADLINE_EXCEEDED: ErrorReason.DEADLINE_EXCEEDED,
    FailureReason.EXECUTOR_REQUEST_FAILED: ErrorReason.EXECUTOR_REQUEST_FAILED,
    FailureReason.EXECUTOR_REFUSED: ErrorReason.EXECUTOR_REFUSED,
    FailureReason.CONSTRAINT_REFUSED: ErrorReason.EXECUTOR_REFUSED,
    FailureReason.ENGINE_DOWN: ErrorReason.ENGINE_DOWN,
    FailureReason.DRAINING: ErrorReason.DRAINING,
    FailureReason.TOO_MANY_OUTPUTS: ErrorReason.INVALID_ARGUMENT,
    FailureReason.TENANT_OVER_QUOTA: ErrorReason.QUOTA_EXCEEDED,
    FailureReason.TTFT_DEADLINE_UNREACHABLE: ErrorReason.DEADLINE_UNREACHABLE,
    FailureReason.DEADLINE_UNREACHABLE: ErrorReason.DEADLINE_UNREACHABLE,
}
_OF_FIRST_TOKEN = frozenset(
    {FailureReason.TTFT_DEADLINE_EXCEEDED, FailureReason.TTFT_DEADLINE_UNREACHABLE}
)
_CONSTRAINT_PATHS: dict[ConstraintKind, str] = {
    ConstraintKind.JSON_SCHEMA: "constraint.json_schema.schema",
    ConstraintKind.REGEX: "constraint.regex.pattern",
    ConstraintKind.GRAMMAR: "constraint.grammar.ebnf",
    ConstraintKind.CHOICE: "constraint.choice.choices",
}
_NOT_COMPILED = "cannot be compiled, or can reach a point from which no output is complete"
_CLOCK_ERROR_MS = 1e-3
_OF_TIME = frozenset({ErrorReason.DEADLINE_EXCEEDED, ErrorReason.DEADLINE_UNREACHABLE})
_QUOTA_NAMES: dict[QuotaKind, str] = {
    QuotaKind.NUM_LIVE: "max_num_live",
    QuotaKind.REQUESTS_PER_MINUTE: "max_requests_per_minute",
    QuotaKind.TOKENS_PER_MINUTE: "max_tokens_per_minute",
    QuotaKind.NUM_WAITING: "max_num_waiting_per_tenant",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One invalid field: its proto path, such as `stopping.stop_strings[2]`, and the rule."""

    path: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaViolation:
    """The tenant and the exceeded limit, as in google.rpc.QuotaFailure."""

    subject: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What the caller learns about a failed call.

    `message`: for people; empty for the standard message of `reason`. `metadata`: the keys that the
    contract lists for `reason`. `retry_after_s`: seconds until a retry; None: the front's default
    if `reason` is retryable; infinite: never. `quota`: the violation for QUOTA_EXCEEDED.
    """

    reason: ErrorReason
    message: str = ""
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA)
    violations: tuple[FieldViolation, ...] = ()
    retry_after_s: float | None = None
    quota: QuotaViolation | None = None


ENGINE_DOWN = Refusal(reason=ErrorReason.ENGINE_DOWN)
INTERNAL = Refusal(reason=ErrorReason.INTERNAL)


class RequestError(Exception):
    """A call that fails for a reason of the contract. Carries a `Refusal`, never free text."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason.value)
        self.refusal = refusal

    @property
    def reason(self) -> ErrorReason:
        """Short for `refusal.reason`."""
        return self.refusal.reason


def refuse(reason: ErrorReason, message: str = "", **metadata: str) -> RequestError:
    """Return the error for `reason`."""
    return RequestError(Refusal(reason=reason, message=message, metadata=metadata))


def refuse_field(
    path: str, description: str, reason: ErrorReason = ErrorReason.INVALID_ARGUMENT, **metadata: str
) -> RequestError:
    """Return the error for one invalid field."""
    violation = FieldViolation(path=path, description=description)
    return RequestError(Refusal(reason=reason, metadata=metadata, violations=(violation,)))


def refuse_feature(feature: str, path: str = "", executor: str = "") -> RequestError:
    """Return the error for an unsupported feature, a field of ModelFeatures.

    `path`: the field that requested it. `executor`: the name of the executor that lacks it; empty
    if no executor would support it here.
    """
    lacking = f"the {executor} executor" if executor else "this service"
    metadata = {"feature": feature, "field": path} if path else {"feature": feature}
    return RequestError(
        Refusal(
            reason=ErrorReason.FEATURE_UNSUPPORTED,
            message=(
                f"{f'{path}: ' if path else ''}{feature} is not supported by {lacking};"
                " GetModel (penstock models --json) lists what is"
            ),
            metadata=metadata,
        )
    )


def refusal_for(
    end: Failed, generation: Generation, *, phases: PhaseClock, deadline_kind: str, tenant: str
) -> Refusal:
    """Return the refusal for a request of `tenant` that the engine ended with `end`."""
    reason = _REASONS[end.reason]
    metadata: dict[str, str] = {}
    if reason in _OF_TIME:
        metadata = {
            "state": phases.state.name,
            "phase": phases.phase.value,
            "deadline": "ttft" if end.reason in _OF_FIRST_TOKEN else deadline_kind,
        }
    # Rounded up: an estimate that misses its deadline by under a millisecond must still exceed it.
    if _is_known(end.deadline_s):
        metadata["deadline_ms"] = str(_whole_ms(end.deadline_s))
    if _is_known(end.estimate_s):
        estimate_ms = math.ceil(end.estimate_s * 1e3)
        if _is_known(end.deadline_s) and end.estimate_s > end.deadline_s:
            estimate_ms = max(estimate_ms, _whole_ms(end.deadline_s) + 1)
        metadata["estimate_ms"] = str(estimate_ms)
    if end.chance is not None:
        metadata["chance"] = f"{end.chance:.3f}"
    return Refusal(
        reason=reason,
        metadata=metadata,
        violations=_violations(end, generation),
        retry_after_s=end.retry_after_s,
        quota=None if end.breach is None else quota_violation(tenant, end.breach),
    )


def _violations(end: Failed, generation: Generation) -> tuple[FieldViolation, ...]:
    """Return the violation, for reasons that concern a single field."""
    match end.reason:
        case FailureReason.PROMPT_TOO_LONG:
            path, description = generation.prompt_path, "exceeds the context"
        case FailureReason.EXCEEDS_KV_CACHE:
            path, description = "stopping.max_tokens", "exceeds the KV cache"
        case FailureReason.TOO_MANY_OUTPUTS:
            limit = "the queue has places"
            if end.breach is not None:
                limit = f"{_QUOTA_NAMES[end.breach.kind]}, which is {end.breach.limit}"
            path, description = "sampling.num_outputs", f"is more than {limit}"
        case FailureReason.CONSTRAINT_REFUSED if generation.constraint is not None:
            path, description = _CONSTRAINT_PATHS[generation.constraint.kind], _NOT_COMPILED
        case _:
            return ()
    return (FieldViolation(path=path, description=description),)


def quota_violation(tenant: str, breach: QuotaBreach) -> QuotaViolation:
    """Return the violation, which names the exceeded limit by its setting."""
    return QuotaViolation(
        subject=quota_subject(tenant),
        description=f"{_QUOTA_NAMES[breach.kind]} is {breach.limit}",
    )


def quota_subject(tenant: str) -> str:
    """Return the subject of google.rpc.QuotaFailure for a tenant."""
    return f"tenant:{tenant}" if tenant else "tenant"


def _whole_ms(duration_s: float) -> int:
    """Convert to milliseconds, rounded down.

    A client's whole number is returned unchanged, although floating-point sums on the engine's
    clock may have lost its last digits.
    """
    nearest = round(duration_s * 1e3)
    if abs(duration_s * 1e3 - nearest) < _CLOCK_ERROR_MS:
        return nearest
    return math.floor(duration_s * 1e3)


def _is_known(duration_s: float | None) -> TypeGuard[float]:
    return duration_s is not None and math.isfinite(duration_s)
