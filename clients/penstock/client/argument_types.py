"""Checks the type and the range of arguments where no protobuf field does."""

import math
from numbers import Integral, Real
from typing import SupportsFloat, cast


def require_type(value: object, name: str, *kinds: type | None) -> None:
    """Raise TypeError unless the argument has one of the types in `kinds`. None in `kinds` permits
    None.

    The error names the argument and the permitted types.
    """
    if value is None and None in kinds:
        return
    if not isinstance(value, tuple(kind for kind in kinds if kind is not None)):
        wanted = " or ".join("None" if kind is None else kind.__name__ for kind in kinds)
        raise TypeError(f"{name}: must be {wanted}, not {type(value).__name__}")


def require_number(
    value: object,
    name: str,
    kind: type[Integral] | type[Real],
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
) -> None:
    """Raise TypeError unless the argument is of type `kind` and not a bool, and ValueError if it is
    not finite or is out of range.

    The error names the argument and what is permitted.
    """
    if isinstance(value, bool) or not isinstance(value, kind):
        wanted = "an int" if kind is Integral else "a number"
        raise TypeError(f"{name}: must be {wanted}, not {type(value).__name__}")
    number = float(cast("SupportsFloat", value))
    if math.isfinite(number) and number > above and at_least <= number <= at_most:
        return
    limits = {"at least": at_least, "above": above, "at most": at_most}
    words = [f"{word} {limit:,.12g}" for word, limit in limits.items() if math.isfinite(limit)]
    raise ValueError(f"{name}: must be {' and '.join(words) or 'finite'}, not {value}")
