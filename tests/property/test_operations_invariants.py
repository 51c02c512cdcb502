"""Invariants of percentiles and of lists that are returned in pages, for any values."""

from __future__ import annotations

import base64
import dataclasses
import math
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.observe.operations.engine_steps import DurationWindow
from penstock.server.rpc.operations_methods import BadPageToken, SortKey, page_of

DURATIONS = st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=60)
PLACES = st.lists(
    st.tuples(st.floats(0, 1e10), st.text(max_size=3), st.text(max_size=5)),
    unique=True,
    max_size=40,
)


@given(DURATIONS, st.lists(st.integers(0, 5), min_size=60, max_size=60))
def test_percentiles_are_those_of_the_sorted_values(
    values: list[float], weights: list[int]
) -> None:
    window = DurationWindow()
    weights = weights[: len(values)]
    window.add(10.0, values, weights)
    reported = window.percentiles(10.0)
    every = sorted(
        value for value, weight in zip(values, weights, strict=True) for _ in range(weight)
    )

    assert reported.num == len(every)
    for level, reported_s in ((0.5, reported.p50_s), (0.9, reported.p90_s), (0.99, reported.p99_s)):
        if every:
            assert reported_s == pytest.approx(every[math.ceil(level * len(every)) - 1], rel=0.0101)
        else:
            assert reported_s is None


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    key: SortKey


def key_of(entry: Entry) -> SortKey:
    return entry.key


@given(PLACES, st.integers(1, 7))
def test_pages_together_are_the_list(keys: list[SortKey], size: int) -> None:
    names = {key[1:]: key for key in keys}
    entries = [Entry(key) for key in sorted(names.values())]
    found: list[Entry] = []
    token = ""
    for _ in range(len(entries) + 1):
        page = page_of(entries, key_of, size=size, token=token, filters=b"f")
        assert len(page.entries) <= size
        found += page.entries
        token = page.next_token
        if not token:
            break

    assert found == entries


@given(PLACES.filter(bool), st.data())
def test_a_page_continues_although_its_last_entry_has_gone(
    keys: list[SortKey], data: st.DataObject
) -> None:
    names = {key[1:]: key for key in keys}
    entries = [Entry(key) for key in sorted(names.values())]
    size = data.draw(st.integers(1, len(entries)))
    first = page_of(entries, key_of, size=size, token="", filters=b"")
    if first.next_token:
        rest = [entry for entry in entries if entry != first.entries[-1]]
        page = page_of(rest, key_of, size=100, token=first.next_token, filters=b"")
        assert list(page.entries) == entries[size:]


@given(st.text(max_size=200))
def test_no_text_is_taken_for_a_token(token: str) -> None:
    if token:
        with pytest.raises(BadPageToken):
            page_of([], key_of, size=1, token=token, filters=b"")


@pytest.mark.parametrize(
    "body",
    [
        "[0,NaN,{names}]",
        "[0,Infinity,{names}]",
        "[0,-1e999,{names}]",
        "[0,1,{names}]",
        "[" * 2900,
        "5",
        "null",
        "[0]",
        "[[],1.0,{names}]",
        "{}",
    ],
)
def test_a_forged_token_with_a_valid_checksum_is_rejected(body: str) -> None:
    packed = body.replace("{names}", '"a","b"').encode()
    token = base64.urlsafe_b64encode(zlib.crc32(packed).to_bytes(4) + packed).decode()
    with pytest.raises(BadPageToken):
        page_of([], key_of, size=1, token=token, filters=b"")
