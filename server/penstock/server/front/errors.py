"""Defines the details of a failed call (`Failure`), and the exception that carries them.

Also defines the API's error reason for each failure that the engine reports. Only the gRPC layer
maps reasons to status codes (`penstock.server.rpc.statuses`). An error must not contain text of a
prompt or an output, because proxies may log it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from penstock.scheduler.events import Failed
from penstock.scheduler.quotas import QuotaBreach, QuotaKind
from penstock.scheduler.request import ConstraintKind, FailureReason
from penstock.server.error_reason import ErrorReason as ErrorReason
from penstock.server.front.generation import GenerationSpec
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
    FailureReason.EXECUTOR_REJECTED: ErrorReason.EXECUTOR_REJECTED,
    FailureReason.CONSTRAINT_REJECTED: ErrorReason.EXECUTOR_REJECTED,
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
CONSTRAINT_PATHS: dict[ConstraintKind, str] = {
    ConstraintKind.JSON_SCHEMA: "constraint.json_schema.schema",
    ConstraintKind.REGEX: "constraint.regex.pattern",
    ConstraintKind.GRAMMAR: "constraint.grammar.ebnf",
    ConstraintKind.CHOICE: "constraint.choice.choices",
}
_NOT_COMPILED = "cannot be compiled, or can reach a point from which no output is complete"
_CLOCK_ERROR_MS = 1e-3
_OF_TIME = frozenset({ErrorReason.DEADLINE_EXCEEDED, ErrorReason.DEADLINE_UNREACHABLE})
# The setting, and the plural noun for what it limits.
_QUOTAS: dict[QuotaKind, tuple[str, str]] = {
    QuotaKind.NUM_LIVE: ("max_num_live", "requests at a time"),
    QuotaKind.REQUESTS_PER_MINUTE: ("max_requests_per_minute", "requests per minute"),
    QuotaKind.TOKENS_PER_MINUTE: ("max_tokens_per_minute", "tokens per minute"),
    QuotaKind.NUM_WAITING: ("max_num_waiting_per_tenant", "waiting requests"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One invalid field: its proto path, such as `stopping.stop_strings[2]`, and the rule it
    violates."""

    path: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaViolation:
    """A quota violation, as in google.rpc.QuotaFailure: the tenant and the exceeded limit."""

    subject: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error details that a failed call returns to the caller, both for a rejected request and
    for one that fails later.

    Attributes:
        message: Text for humans; empty for the standard message of `reason`.
        metadata: The error metadata that the API defines for `reason`.
        retry_after_s: Seconds until the caller may retry; infinite if it must not. None: the
            default of the front (gRPC server process) if `reason` is retryable.
        quota: The quota violation; set only for QUOTA_EXCEEDED.
    """

    reason: ErrorReason
    message: str = ""
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA)
    violations: tuple[FieldViolation, ...] = ()
    retry_after_s: float | None = None
    quota: QuotaViolation | None = None


ENGINE_DOWN = Failure(reason=ErrorReason.ENGINE_DOWN)
INTERNAL = Failure(reason=ErrorReason.INTERNAL)


class RequestError(Exception):
    """A call failed with an error reason of the API. Carries a `Failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason.value)
        self.failure = failure

    @property
    def reason(self) -> ErrorReason:
        """The error reason of `failure`."""
        return self.failure.reason


def request_error(reason: ErrorReason, message: str = "", **metadata: str) -> RequestError:
    """Return the error for `reason`, with the `metadata` that the API defines for it."""
    return RequestError(Failure(reason=reason, message=message, metadata=metadata))


def invalid_field(
    path: str, description: str, reason: ErrorReason = ErrorReason.INVALID_ARGUMENT, **metadata: str
) -> RequestError:
    """Return the error for the invalid field at `path`. `description` and `path`: see
    `FieldViolation`."""
    violation = FieldViolation(path=path, description=description)
    return RequestError(Failure(reason=reason, metadata=metadata, violations=(violation,)))


def unsupported_feature(
    feature: str, path: str = "", executor: str = "", cause: str = ""
) -> RequestError:
    """Return the error for an unsupported feature. Features are named as in ModelFeatures.

    `path` is the request field that uses the feature. `executor` is the name of the executor that
    does not support it; empty if this does not depend on the executor. `cause` replaces the
    standard text.
    """
    lacking = f"the {executor} executor" if executor else "this service"
    cause = cause or (
        f"is not supported by {lacking}; GetModel (penstock models --json) lists what is supported"
    )
    return RequestError(
        Failure(
            reason=ErrorReason.FEATURE_UNSUPPORTED,
            message=f"{path}: {cause}" if path else f"{feature} {cause}",
            metadata={"feature": feature, "field": path} if path else {"feature": feature},
        )
    )


def quota_exceeded(tenant: str, breach: QuotaBreach) -> RequestError:
    """Return the error for a tenant that exceeds a quota."""
    setting, counted = _QUOTAS[breach.kind]
    return limit_exceeded(tenant, setting, breach.limit, counted, breach.retry_after_s)


def limit_exceeded(
    tenant: str, setting: str, limit: int, counted: str, retry_after_s: float | None
) -> RequestError:
    """Return the error for a tenant that exceeds `limit`, the value of the setting `setting`.

    `counted` is the plural noun for what the setting limits, for the message, such as "waiting
    requests". `retry_after_s`: see `Failure`.
    """
    owner = f'tenant "{tenant}"' if tenant else "all requests without a tenant"
    return RequestError(
        Failure(
            reason=ErrorReason.QUOTA_EXCEEDED,
            message=f"{owner}: at most {limit} {counted}",
            retry_after_s=retry_after_s,
            quota=QuotaViolation(
                subject=f"tenant:{tenant}" if tenant else "tenant",
                description=f"{setting} is {limit}",
            ),
        )
    )


def failure_for(
    end: Failed, generation: GenerationSpec, *, phases: PhaseClock, deadline_kind: str, tenant: str
) -> Failure:
    """Return the error details for a request that the engine ended with `end`.

    `deadline_kind` is what sets the earliest deadline: `total` (a field of the request), `grpc`
    (the call) or `server` (the settings).
    """
    reason = _REASONS[end.reason]
    over_quota: Failure | None = None
    if reason is ErrorReason.QUOTA_EXCEEDED and end.breach is not None:
        over_quota = quota_exceeded(tenant, end.breach).failure
    metadata: dict[str, str] = {}
    if reason in _OF_TIME:
        metadata = {
            "state": phases.state.name,
            "phase": phases.phase.value,
            "deadline": "ttft" if end.reason in _OF_FIRST_TOKEN else deadline_kind,
        }
    # Rounded up: an estimate that exceeds the deadline by under a millisecond must still show as
    # larger.
    if _is_known(end.deadline_s):
        metadata["deadline_ms"] = str(_whole_ms(end.deadline_s))
    if _is_known(end.estimate_s):
        estimate_ms = math.ceil(end.estimate_s * 1e3)
        if _is_known(end.deadline_s) and end.estimate_s > end.deadline_s:
            estimate_ms = max(estimate_ms, _whole_ms(end.deadline_s) + 1)
        metadata["estimate_ms"] = str(estimate_ms)
    if end.chance is not None:
        metadata["chance"] = f"{end.chance:.3f}"
    return Failure(
        reason=reason,
        message="" if over_quota is None else over_quota.message,
        metadata=metadata,
        violations=_violations(end, generation),
        retry_after_s=end.retry_after_s,
        quota=None if over_quota is None else over_quota.quota,
    )


def _violations(end: Failed, generation: GenerationSpec) -> tuple[FieldViolation, ...]:
    """Return the field violation if the reason concerns a single field; otherwise an empty
    tuple."""
    match end.reason:
        case FailureReason.PROMPT_TOO_LONG:
            path, description = generation.prompt_path, "exceeds the context"
        case FailureReason.EXCEEDS_KV_CACHE:
            path, description = "stopping.max_tokens", "exceeds the KV cache"
        case FailureReason.TOO_MANY_OUTPUTS:
            limit = "the queue has places"
            if end.breach is not None:
                limit = f"{_QUOTAS[end.breach.kind][0]}, which is {end.breach.limit}"
            path, description = "sampling.num_outputs", f"is more than {limit}"
        case FailureReason.CONSTRAINT_REJECTED if generation.constraint is not None:
            path, description = CONSTRAINT_PATHS[generation.constraint.kind], _NOT_COMPILED
        case _:
            return ()
    return (FieldViolation(path=path, description=description),)


def _whole_ms(duration_s: float) -> int:
    """Convert seconds to milliseconds, rounded down.

    A whole number set by a client is returned exactly, even if floating-point sums on the engine's
    clock have changed its last digits.
    """
    nearest = round(duration_s * 1e3)
    if abs(duration_s * 1e3 - nearest) < _CLOCK_ERROR_MS:
        return nearest
    return math.floor(duration_s * 1e3)


def _is_known(duration_s: float | None) -> TypeGuard[float]:
    return duration_s is not None and math.isfinite(duration_s)
