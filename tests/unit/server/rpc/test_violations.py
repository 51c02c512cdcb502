"""How a violation of the bounds of a duration is worded."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.server.front.errors import RequestError
from penstock.server.rpc.mapping_in.violations import Violations


@pytest.mark.parametrize(
    ("seconds", "nanos", "reported"),
    [
        (0, 0, "must be a positive duration, not 0 seconds"),
        (0, -1, "must be a positive duration, not -1e-09 seconds"),
        (-1, 10**9 - 1, "must be a positive duration, not -1e-09 seconds"),
        (1, -1, "nanos must be from 0 to 999999999, not -1"),
        (1, 10**9, "nanos must be from 0 to 999999999, not 1000000000"),
        (3600, 1000, "must be at most 3600 seconds, not 3600.000001"),
        (2**63 - 1, 0, "must be at most 3600 seconds, not 9.22337203685478e+18"),
    ],
)
def test_the_error_of_a_bad_duration_is_shown(seconds: int, nanos: int, reported: str) -> None:
    violations = Violations()
    violations.duration_s("path", Duration(seconds=seconds, nanos=nanos), 3600.0)
    with pytest.raises(RequestError) as caught:
        violations.raise_if_any()
    assert [one.description for one in caught.value.failure.violations] == [reported]


def test_a_duration_without_its_own_bound_has_that_of_its_type() -> None:
    violations = Violations()
    most = 315_576_000_000
    assert violations.duration_s("path", Duration(seconds=most)) == most
    assert not violations.is_any
    violations.duration_s("path", Duration(seconds=most + 1))
    with pytest.raises(RequestError) as caught:
        violations.raise_if_any()
    assert f"at most {most} seconds" in caught.value.failure.violations[0].description
