"""Why a call fails: the contract's reasons, and the exception that carries them.

Only the gRPC layer knows status codes (`penstock.server.rpc.statuses`). A refusal must not contain
prompt or output text: clients see it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.server.error_reason import ErrorReason as ErrorReason


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One invalid field: its proto path, such as `stopping.stop_strings[2]`, and the rule."""

    path: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaViolation:
    """The tenant and the limit that is exceeded, as in google.rpc.QuotaFailure."""

    subject: str
    description: str


NO_METADATA: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What the caller learns about a failed call.

    `message`: for people; empty for the standard message of `reason`. `metadata`: the keys that the
    contract lists for `reason`. `retry_after_s`: when to retry; None for the front's default where
    `reason` is retryable, infinite for never. `quota`: of QUOTA_EXCEEDED.
    """

    reason: ErrorReason
    message: str = ""
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA)
    violations: tuple[FieldViolation, ...] = ()
    retry_after_s: float | None = None
    quota: QuotaViolation | None = None


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
    """The error to raise for `reason`."""
    return RequestError(Refusal(reason=reason, message=message, metadata=metadata))


def refuse_field(
    path: str, description: str, reason: ErrorReason = ErrorReason.INVALID_ARGUMENT, **metadata: str
) -> RequestError:
    """The error to raise for one invalid field."""
    violation = FieldViolation(path=path, description=description)
    return RequestError(Refusal(reason=reason, metadata=metadata, violations=(violation,)))


def refuse_feature(feature: str, path: str = "") -> RequestError:
    """The error to raise for an unsupported feature: a field of ModelFeatures, requested at
    `path`.
    """
    metadata = {"feature": feature, "field": path} if path else {"feature": feature}
    return RequestError(
        Refusal(
            reason=ErrorReason.FEATURE_UNSUPPORTED,
            message=f"not supported here: {feature}",
            metadata=metadata,
        )
    )
