"""What survival counts as damage: tokens missing, doubled or changed, and skipped messages."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


@pytest.fixture
def streams() -> Any:
    return importlib.import_module("survival_streams")


@pytest.mark.parametrize(
    ("ids", "num_skips", "num_wrong"),
    [
        ([1, 2, 3, 4], 0, 0),
        ([1, 2, 3], 0, 1),
        ([1, 2, 2, 3, 4], 0, 3),
        ([1, 9, 3, 4], 0, 1),
        ([], 0, 4),
        ([1, 2, 3, 4], 2, 2),
    ],
)
def test_damage_is_counted(ids: list[int], num_skips: int, num_wrong: int, streams: Any) -> None:
    references = streams.References(ids={7: [1, 2, 3, 4]})

    assert references.wrong_of(7, streams.Told(ids=ids, num_skips=num_skips)) == num_wrong


def test_the_first_token_after_a_moment_is_found(streams: Any) -> None:
    told = streams.Told(stamps_s=[(1.0, 1), (2.0, 2), (5.0, 3)])

    assert told.first_after_s(1.5) == 2.0
    assert told.first_after_s(5.0) is None


def test_every_stream_asks_for_something_else(streams: Any) -> None:
    prompts = {tuple(streams.request(index, 5).token_prompt.ids) for index in range(80)}

    assert len(prompts) == 80
