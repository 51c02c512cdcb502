"""Invalid values of the options that a request passes to its executor are rejected."""

from __future__ import annotations

import pytest

from penstock.scheduler.request import (
    CacheRetention,
    Constraint,
    ConstraintKind,
)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (ConstraintKind.REGEX, ()),
        (ConstraintKind.REGEX, ("a", "b")),
        (ConstraintKind.CHOICE, ("",)),
    ],
)
def test_constraints_have_texts(kind: ConstraintKind, texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="constraint"):
        Constraint(kind=kind, texts=texts)


@pytest.mark.parametrize("fields", [{"level": 101}, {"level": -1}, {"duration_s": 0.0}])
def test_retention_is_bounded(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="retention"):
        CacheRetention(**fields)  # type: ignore[arg-type]
