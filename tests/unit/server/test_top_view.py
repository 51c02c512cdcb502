"""What `penstock top` draws, and in which order it sorts requests."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from penstock.client import LiveRequest, RequestPhase, ServerStats
from penstock.client.operations_decoding import decode_live_request, decode_stats
from penstock.server.cli.top_state import SORT_KEYS, TopState
from penstock.server.cli.top_view import frame_of
from penstock.server.observe.operations.snapshot import CacheSnapshot, Snapshot
from penstock.server.rpc.mapping_operations import live_request_of, stats_of
from support.snapshots import MODEL, SNAPSHOT, request_view, waiting_view


def stats(snapshot: Snapshot = SNAPSHOT, **model: Any) -> ServerStats:
    models = (dataclasses.replace(MODEL, **model),)
    return decode_stats(stats_of(dataclasses.replace(snapshot, models=models)))


def live(*views: Any) -> tuple[LiveRequest, ...]:
    return tuple(decode_live_request(live_request_of(view)) for view in views)


def board_of(*views: Any, **model: Any) -> TopState:
    state = TopState("here:50052")
    state.update(stats(**model), live(*views))
    return state


def drawn(state: TopState, width: int | None = 120, height: int | None = None) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width or 10_000, color_system=None)
    console.print(frame_of(state, width=width, height=height))
    return out.getvalue().splitlines()


def test_a_frame_shows_load_latency_and_requests() -> None:
    text = "\n".join(drawn(board_of(request_view(1), waiting_view(2, queue_position=4))))

    for part in (
        "here:50052 tiny READY  up 2h03m  engine 2 (1 restarts)",
        "running 5/8  waiting 3 for blocks (~750 ms)  tokens/s 900 out, 120 in",
        "completed 11  cancelled 1  failed 1  rejected 2  preempted 4  prefix hits 25%",
        "TTFT            50 ms    100 ms    200 ms",
        "100 blocks of 16 tokens: 40 used, 35 cached, 25 free",
        "2 requests by age",
        "#4 blocks",
    ):
        assert part in text


def test_the_last_answer_is_shown_if_the_service_is_unreachable() -> None:
    state = board_of(request_view(1))
    state.record_failure("UNAVAILABLE: gone")
    lines = drawn(state)
    assert "no response since" in lines[0]
    assert "UNAVAILABLE: gone" in lines[0]
    assert any("request-1" in line for line in lines)

    state.update(stats(), live())
    assert "no response" not in "\n".join(drawn(state))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 20), (200, 60)])
def test_a_frame_fits_its_screen(width: int, height: int) -> None:
    views = [request_view(number, request_id="r" * 100, tenant="t" * 40) for number in range(300)]
    state = board_of(
        *views,
        cache=CacheSnapshot(
            block_size_tokens=16, num_total_blocks=5000, num_used_blocks=2400, num_free_blocks=2600
        ),
    )
    lines = drawn(state, width, height)

    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any(" more" in line for line in lines)


def test_the_pool_is_drawn_by_owner_and_state() -> None:
    state = board_of(
        request_view(1, tenant="a", num_blocks=20), request_view(2, tenant="b", num_blocks=5)
    )
    lines = drawn(state, 100)
    grid = "█" * 40 + "▒" * 35 + "·" * 25

    assert grid in lines
    assert any("█ a 20  █ b 5  █ other 15  ▒ cached  · free" in line for line in lines)


def test_shares_never_exceed_what_is_used() -> None:
    state = board_of(
        request_view(1, tenant="a", num_blocks=60), request_view(2, tenant="b", num_blocks=60)
    )
    assert any("█ a 20  █ b 20" in line for line in drawn(state, 100))


def test_control_characters_of_an_id_are_not_interpreted() -> None:
    text = "\n".join(drawn(board_of(request_view(1, request_id="[red]x[/red]\x1b[2J"))))

    assert "[red]x[/red]" in text
    assert "\x1b" not in text


def test_requests_are_sorted_by_what_is_chosen() -> None:
    state = board_of(
        request_view(1, tenant="b", num_blocks=1),
        request_view(2, tenant="a", num_blocks=3, num_output_tokens=500),
        waiting_view(3, tenant="c", queue_position=0),
    )
    orders: dict[str, list[str]] = {}
    for _ in SORT_KEYS:
        orders[state.sort_key] = [each.request_id[-1] for each in state.sorted_requests]
        state.sort_by_next()

    assert orders == {
        "age": ["1", "2", "3"],
        "tokens": ["2", "1", "3"],
        "blocks": ["2", "1", "3"],
        "queue": ["3", "1", "2"],
        "tenant": ["2", "1", "3"],
        "phase": ["3", "1", "2"],
    }
    assert state.sort_key == "age"


def test_phases_newer_than_this_client_are_drawn_by_state() -> None:
    (request,) = live(request_view(1))
    state = TopState("here")
    state.update(stats(), [dataclasses.replace(request, phase=RequestPhase.UNKNOWN)])
    assert any("processing" in line for line in drawn(state))
