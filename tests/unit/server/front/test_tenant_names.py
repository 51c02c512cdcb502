"""Valid tenant names, and equal request ids of different tenants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.tenants import NO_TENANT, engine_request_id, tenant_fault

PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)


@pytest.mark.parametrize("name", ["a", "team 1", "a=b", "x" * 128, "/;:~"])
def test_a_good_name_has_no_fault(name: str) -> None:
    assert tenant_fault(name) is None


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("", "1 to 128 characters"),
        ("x" * 129, "1 to 128 characters"),
        ("a\tb", "printable ASCII"),
        ("a\x7f", "printable ASCII"),
        ("a\x1fb", "printable ASCII"),
        ("\u00e9", "printable ASCII"),
        ("a,b", "without a comma"),
    ],
)
def test_a_bad_name_error_lists_the_allowed_characters(name: str, fault: str) -> None:
    assert fault in (tenant_fault(name) or "")


@given(PRINTABLE, PRINTABLE, PRINTABLE, PRINTABLE)
def test_no_two_requests_have_one_id(a: str, id_a: str, b: str, id_b: str) -> None:
    is_same = engine_request_id(a, id_a) == engine_request_id(b, id_b)
    assert is_same == ((a, id_a) == (b, id_b))


def test_a_request_without_a_tenant_keeps_its_id() -> None:
    assert engine_request_id(NO_TENANT, "r") == "r"
