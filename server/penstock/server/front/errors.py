"""Why a call fails, in the words of the contract.

Owns the reasons and the one exception that carries them from any depth of the front to the gRPC
edge, which alone knows status codes (`penstock.server.rpc.statuses`). Nothing in it may hold prompt
or output text: it is shown to strangers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.server.error_reason import ErrorReason as ErrorReason


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One field that is off: its proto path, such as `stopping.stop_strings[2]`, and the rule."""

    path: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaViolation:
    """Whose limit is used up, and which it is: as google.rpc.QuotaFailure has them."""

    subject: str
    description: str


NO_METADATA: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Everything a caller may know about a failed call.

    `message`: for people; empty takes the standard sentence of `reason`. `metadata`: the keys
    that the contract lists for `reason`. `retry_after_s`: when it is worth trying again, None to
    say what the front says of all, if `reason` is one that passes, infinite for never. `quota`: of
    QUOTA_EXCEEDED.
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
    """The error to raise when one field is off."""
    violation = FieldViolation(path=path, description=description)
    return RequestError(Refusal(reason=reason, metadata=metadata, violations=(violation,)))


def refuse_feature(feature: str, path: str = "") -> RequestError:
    """The error to raise for what is not there: a field of ModelFeatures, asked for at `path`."""
    metadata = {"feature": feature, "field": path} if path else {"feature": feature}
    return RequestError(
        Refusal(
            reason=ErrorReason.FEATURE_UNSUPPORTED,
            message=f"not supported here: {feature}",
            metadata=metadata,
        )
    )
