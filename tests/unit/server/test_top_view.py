"""What `penstock top` draws, and what it remembers."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.client import LiveRequest, RequestPhase, ServerStats
from penstock.client.operations_decoding import decode_live_request, decode_stats
from penstock.server.cli import top_view
from penstock.server.cli.top_view import (
    MAX_COURSE,
    SORT_KEYS,
    Board,
    cells_of,
    count,
    duration,
    frame_of,
    span,
    sparkline,
)
from penstock.server.observe.operations.snapshot import CacheSnapshot, Snapshot
from penstock.server.rpc.mapping_operations import live_request_of, stats_of
from support.operations_house import MODEL, SNAPSHOT, request_view, waiting_view


def stats(snapshot: Snapshot = SNAPSHOT, **model: Any) -> ServerStats:
    models = (dataclasses.replace(MODEL, **model),)
    return decode_stats(stats_of(dataclasses.replace(snapshot, models=models)))


def live(*views: Any) -> tuple[LiveRequest, ...]:
    return tuple(decode_live_request(live_request_of(view)) for view in views)


def board_of(*views: Any, **model: Any) -> Board:
    board = Board("here:50052")
    board.take(stats(**model), live(*views))
    return board


def drawn(board: Board, width: int | None = 120, height: int | None = None) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width or 10_000, color_system=None)
    console.print(frame_of(board, width=width, height=height))
    return out.getvalue().splitlines()


def test_a_frame_holds_what_an_operator_asks_first() -> None:
    text = "\n".join(drawn(board_of(request_view(1), waiting_view(2, queue_position=4))))

    for part in (
        "here:50052 tiny READY  up 2h03m  engine 2 (1 restarts)",
        "running 5/8  waiting 3 for blocks (~750 ms)  tokens/s 900 out, 120 in",
        "completed 11  cancelled 1  failed 1  refused 2  preempted 4  prefix hits 25%",
        "TTFT            50 ms    100 ms    200 ms",
        "100 blocks of 16 tokens: 40 used, 35 cached, 25 free",
        "2 requests by age",
        "#4 blocks",
    ):
        assert part in text


def test_before_the_first_answer_it_says_who_is_asked() -> None:
    board = Board("here:50052")
    assert drawn(board) == ["here:50052: no answer yet"]
    board.miss("UNAVAILABLE: gone")
    assert drawn(board) == ["here:50052: UNAVAILABLE: gone"]


def test_a_service_that_is_away_leaves_the_last_answer_in_sight() -> None:
    board = board_of(request_view(1))
    board.miss("UNAVAILABLE: gone")
    lines = drawn(board)
    assert "no answer since" in lines[0]
    assert "UNAVAILABLE: gone" in lines[0]
    assert any("request-1" in line for line in lines)

    board.take(stats(), live())
    assert "no answer" not in "\n".join(drawn(board))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 20), (200, 60)])
def test_a_frame_fits_its_screen(width: int, height: int) -> None:
    views = [request_view(number, request_id="r" * 100, tenant="t" * 40) for number in range(300)]
    board = board_of(
        *views,
        cache=CacheSnapshot(
            block_size_tokens=16, num_total_blocks=5000, num_used_blocks=2400, num_free_blocks=2600
        ),
    )
    lines = drawn(board, width, height)

    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any(" more" in line for line in lines)


def test_nothing_is_cut_where_there_is_no_terminal() -> None:
    name, tenant = "r" * 120, "t" * 64
    views = [waiting_view(number, request_id=name, tenant=tenant) for number in range(3)]
    lines = drawn(board_of(*views), width=None)

    assert sum(name in line and tenant in line for line in lines) == 3
    assert not any("…" in line for line in lines)
    assert "LEFT" in "".join(lines)
    assert max(map(len, lines)) < 350, "no line is filled up to the width of the paper"


def test_requests_that_were_not_asked_for_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_view, "MAX_REQUESTS", 3)
    fronts = tuple(dataclasses.replace(front, num_live=624) for front in SNAPSHOT.fronts[:1] * 2)
    many = Board("here")
    many.take(stats(dataclasses.replace(SNAPSHOT, fronts=fronts)), live(*map(request_view, (1, 2))))
    assert "\n2 requests by age" in "\n".join(drawn(many)), "all of them: fronts are a beat behind"
    many.take(many.stats or stats(), live(*map(request_view, (1, 2, 3))))
    assert "\n3 of 1248 requests by age" in "\n".join(drawn(many))


def test_the_pool_is_drawn_by_owner_and_state() -> None:
    board = board_of(
        request_view(1, tenant="a", num_blocks=20), request_view(2, tenant="b", num_blocks=5)
    )
    lines = drawn(board, 100)
    grid = "█" * 40 + "▒" * 35 + "·" * 25

    assert grid in lines
    assert any("█ a 20  █ b 5  █ other 15  ▒ cached  · free" in line for line in lines)


def test_shares_never_exceed_what_is_used() -> None:
    board = board_of(
        request_view(1, tenant="a", num_blocks=60), request_view(2, tenant="b", num_blocks=60)
    )
    assert any("█ a 20  █ b 20" in line for line in drawn(board, 100))


def test_an_id_is_shown_as_it_is_and_moves_no_cursor() -> None:
    text = "\n".join(drawn(board_of(request_view(1, request_id="[red]x[/red]\x1b[2J"))))

    assert "[red]x[/red]" in text
    assert "\x1b" not in text


def test_requests_are_sorted_by_what_is_chosen() -> None:
    board = board_of(
        request_view(1, tenant="b", num_blocks=1),
        request_view(2, tenant="a", num_blocks=3, num_output_tokens=500),
        waiting_view(3, tenant="c", queue_position=0),
    )
    orders: dict[str, list[str]] = {}
    for _ in SORT_KEYS:
        orders[board.sort_key] = [each.request_id[-1] for each in board.sorted_requests]
        board.sort_by_next()

    assert orders == {
        "age": ["1", "2", "3"],
        "tokens": ["2", "1", "3"],
        "blocks": ["2", "1", "3"],
        "queue": ["3", "1", "2"],
        "tenant": ["2", "1", "3"],
        "phase": ["3", "1", "2"],
    }
    assert board.sort_key == "age"


def test_the_course_of_figures_is_bounded() -> None:
    board = Board("here")
    for _ in range(MAX_COURSE + 5):
        board.take(stats(mean_step_s=None), ())
    assert (len(board.step_s), board.step_s[0]) == (MAX_COURSE, 0.0)


def test_phases_newer_than_this_client_are_drawn_by_state() -> None:
    (request,) = live(request_view(1))
    board = Board("here")
    board.take(stats(), [dataclasses.replace(request, phase=RequestPhase.UNKNOWN)])
    assert any("processing" in line for line in drawn(board))


@pytest.mark.parametrize(
    ("value_s", "told"),
    [
        (None, "-"),
        (0.000_45, "450 us"),
        (0.0012, "1.20 ms"),
        (0.25, "250 ms"),
        (1.234, "1.23 s"),
        (59.0, "59.0 s"),
        (61.0, "1m01s"),
        (7384.5, "2h03m"),
        (90_000.0, "1d01h"),
    ],
)
def test_durations_in_few_characters(value_s: float | None, told: str) -> None:
    assert duration(value_s) == told


def test_other_figures() -> None:
    assert [count(value) for value in (0, 1.25, 12.7, 1234567)] == ["0", "1.2", "13", "1,234,567"]
    assert span(3.25) == "3.2 s"
    assert sparkline([0, 1, 2, 4], 3) == "▃▅█"
    assert sparkline([0, 0], 10) == "▁▁"
    assert sparkline([5], 10) == sparkline([1, 2], 0) == ""


@given(st.lists(st.integers(0, 10**7), max_size=8), st.integers(0, 800))
def test_cells_add_up_and_are_fair(parts: list[int], num_cells: int) -> None:
    cells = cells_of(parts, num_cells)
    total = sum(parts)

    assert sum(cells) == min(num_cells, total)
    for part, num in zip(parts, cells, strict=True):
        assert num >= 0
        if total:
            assert abs(num - part * min(num_cells, total) / total) <= 1
