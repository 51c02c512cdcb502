"""Collects all violations of a request, by proto path.

Also contains the checks of single values. Comparisons are written so that they fail for NaN.
"""

from collections.abc import Mapping
from typing import Final

from google.protobuf.duration_pb2 import Duration

from penstock.conventions import MAX_DURATION_S
from penstock.server.front.errors import (
    ErrorReason,
    Failure,
    FieldViolation,
    RequestError,
    unsupported_feature,
)

MAX_KEPT: Final = 1000
"""Maximum number of violations that are kept, because a malicious message can have a million of
them."""
_NANOS = 1_000_000_000


class Violations:
    """The violations found so far. `raise_if_any` raises them as one error."""

    __slots__ = ("_metadata", "_reason", "_unsupported", "_violations")

    def __init__(self) -> None:
        self._reason = ErrorReason.INVALID_ARGUMENT
        self._metadata: Mapping[str, str] = {}
        self._violations: list[FieldViolation] = []
        self._unsupported: tuple[str, str, str] | None = None

    @property
    def is_any(self) -> bool:
        """True if there is a violation. A missing feature is not one."""
        return bool(self._violations)

    @property
    def is_full(self) -> bool:
        """True if further violations would not be kept."""
        return len(self._violations) >= MAX_KEPT

    def add(self, path: str, description: str) -> None:
        """Record that the value at `path` is invalid. `description` is the reason, such as "must
        not be empty". Ignored if `is_full`."""
        if not self.is_full:
            self._violations.append(FieldViolation(path=path, description=description))

    def prompt_too_long(self, failure: Failure) -> None:
        """Record the violations of `failure`, the error for a prompt that is too long. If there are
        no other violations, `raise_if_any` raises an error with the reason and metadata of
        `failure`."""
        for violation in failure.violations:
            self.add(violation.path, violation.description)
        self._reason = failure.reason
        self._metadata = failure.metadata

    def require_feature(
        self, feature: str, path: str, *, is_supported: bool, executor: str = ""
    ) -> None:
        """Unless `is_supported`, record that `feature` is missing. `path` is the path of the field
        that needs it. Only the first missing feature is reported.

        `executor` is the name of the executor if the feature depends on the executor, otherwise
        empty.
        """
        if not is_supported and self._unsupported is None:
            self._unsupported = (feature, path, executor)

    def raise_if_any(self) -> None:
        """Raise RequestError with all violations if there are any. If there are none but a feature
        is missing, raise the error for the first missing feature."""
        if self._violations:
            is_alone = len(self._violations) == 1
            raise RequestError(
                Failure(
                    reason=self._reason if is_alone else ErrorReason.INVALID_ARGUMENT,
                    metadata=self._metadata if is_alone else {},
                    violations=tuple(self._violations),
                )
            )
        if self._unsupported is not None:
            raise unsupported_feature(*self._unsupported)

    def number(self, path: str, value: float, low: float, high: float) -> float:
        """Return `value` if it is in [low, high]; otherwise record a violation and return `low`."""
        if low <= value <= high:  # This is False for NaN.
            return value
        self.add(path, f"must be from {low:g} to {high:g}, not {value:.9g}")
        return low

    def number_above(self, path: str, value: float, low: float, high: float) -> float:
        """Return `value` if it is in (low, high]; otherwise record a violation and return
        `high`."""
        if low < value <= high:
            return value
        self.add(path, f"must be above {low:g}, at most {high:g}, not {value:.9g}")
        return high

    def integer(self, path: str, value: int, low: int, high: int) -> int:
        """Return `value` if it is in [low, high]; otherwise record a violation and return `low`."""
        if low <= value <= high:
            return value
        self.add(path, f"must be from {low} to {high}, not {value}")
        return low

    def count(self, path: str, num_entries: int, max_entries: int) -> bool:
        """Return True if a list has at most `max_entries` entries; otherwise record a violation and
        return False."""
        if num_entries <= max_entries:
            return True
        self.add(path, f"has {num_entries} entries, at most {max_entries} are allowed")
        return False

    def text_length(self, path: str, value: str, low: int, high: int) -> None:
        """Record a violation unless `value` has at least `low` and at most `high` characters."""
        if not low <= len(value) <= high:
            self.add(path, f"must have {low} to {high} characters, has {len(value)}")

    def duration_s(
        self,
        path: str,
        value: Duration,
        max_s: float = MAX_DURATION_S,
        *,
        can_be_zero: bool = False,
    ) -> float:
        """Return a duration in seconds if it is in (0, max_s], or [0, max_s] if `can_be_zero`;
        otherwise record a violation and return 1."""
        duration_s = (value.seconds * _NANOS + value.nanos) / _NANOS
        if duration_s < 0 or (duration_s == 0 and not can_be_zero):
            wanted = "must not be negative" if can_be_zero else "must be a positive duration"
            self.add(path, f"{wanted}, not {duration_s:.15g} seconds")
        elif duration_s > max_s:
            self.add(path, f"must be at most {max_s:.15g} seconds, not {duration_s:.15g}")
        elif not 0 <= value.nanos < _NANOS:
            self.add(path, f"nanos must be from 0 to {_NANOS - 1}, not {value.nanos}")
        else:
            return duration_s
        return 1.0
