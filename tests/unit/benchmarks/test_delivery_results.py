"""What the delivery benchmark makes of its runs."""

import importlib
from typing import Any

import pytest

BASE = (256, 20.0)


@pytest.fixture
def results() -> Any:
    return importlib.import_module("delivery_results")


def seen(
    side: str, *, load: tuple[int, float] = BASE, round_index: int = 0, **changes: float
) -> Any:
    cells: Any = importlib.import_module("delivery_cells")
    cell = cells.Cell(
        side=side,
        num_streams=load[0],
        step_ms=load[1],
        warm_s=0.5,
        window_s=1.0,
        round_index=round_index,
    )
    values: dict[str, Any] = {
        "num_tokens": 1000,
        "num_messages": 1000,
        "tokens_per_s": cell.offered_per_s,
        "server_us": 30.0,
        "server_cores": 0.5,
        "engine_us": 1.0,
        "client_us": 1.0,
        "foreign_cores": 0.0,
        "delay_p50_ms": 5.0,
        "delay_p99_ms": 10.0,
        "strict_p99_ms": 10.0,
        "slip_ms": 0.0,
        "is_aligned": True,
    }
    return cells.Seen(cell=cell, **{**values, **changes})


def engine(results: Any, link_us: float = 0.5) -> Any:
    return results.EngineCost(
        num_streams=256, num_steps=100, link_us=link_us, events_us=0.1, schedule_us=2.0
    )


def test_noisy_runs_do_not_count_beside_quiet_ones(results: Any) -> None:
    runs = [
        seen("Generate", server_us=10.0),
        seen("Generate", server_us=90.0, foreign_cores=1.0),
        seen("Generate", server_us=12.0),
    ]
    assert results.Results(runs).median(BASE, "Generate", "server_us") == 11.0


def test_noisy_runs_count_where_all_are(results: Any) -> None:
    runs = [seen("Generate", server_us=us, foreign_cores=1.0) for us in (10.0, 30.0)]
    assert results.Results(runs).median(BASE, "Generate", "server_us") == 20.0


def test_a_ratio_needs_both_sides(results: Any) -> None:
    runs = results.Results([seen("Multiplex", server_us=3.0), seen("grpc.aio", server_us=30.0)])
    assert runs.ratio(BASE, "Multiplex", "grpc.aio") == pytest.approx(0.1)
    assert runs.ratio(BASE, "Multiplex", "C++ gRPC") is None


def in_rounds(mine_us: list[float], other_us: list[float], **changes: Any) -> list[Any]:
    runs = [seen("Generate", server_us=us, round_index=n) for n, us in enumerate(mine_us)]
    return runs + [
        seen("grpc.aio", server_us=us, round_index=n, **changes) for n, us in enumerate(other_us)
    ]


def test_a_ratio_is_taken_within_each_round(results: Any) -> None:
    # The machine was slow in one round; the medians of each side would say 2.0.
    runs = results.Results(in_rounds([20.0, 60.0, 22.0], [10.0, 60.0, 20.0]))
    assert runs.ratio(BASE, "Generate", "grpc.aio") == pytest.approx(1.1)


def test_a_round_without_the_other_side_has_no_ratio(results: Any) -> None:
    runs = results.Results(in_rounds([20.0, 60.0, 22.0], [10.0]))
    assert runs.ratio(BASE, "Generate", "grpc.aio") == 2.0


def test_a_round_beside_others_counts_only_where_all_do(results: Any) -> None:
    noisy = seen("grpc.aio", server_us=60.0, round_index=1, foreign_cores=1.0)
    runs = results.Results([*in_rounds([20.0, 60.0], [10.0]), noisy])
    assert len(runs.pairs(BASE, "Generate", "grpc.aio")) == 1
    assert runs.ratio(BASE, "Generate", "grpc.aio") == 2.0


@pytest.mark.parametrize(("num_rounds", "holds"), [(2, None), (3, True)])
def test_two_rounds_are_no_ground_for_a_verdict(
    results: Any, num_rounds: int, holds: bool | None
) -> None:
    runs = results.Results(in_rounds([30.0] * num_rounds, [30.0] * num_rounds))
    checks = results.checks_of(runs, engine(results))
    verdicts = {check.name: check.holds for check in checks}
    assert verdicts["Generate, 256 x 20 ms: CPU per message over grpc.aio"] is holds
    assert verdicts["Generate, 256 x 20 ms: p99 delay"] is holds


def test_cost_per_message_counts_messages(results: Any) -> None:
    coalesced = seen("Generate", server_us=10.0, num_messages=250)
    assert coalesced.message_us == pytest.approx(40.0)
    assert coalesced.per_core == pytest.approx(100_000.0)


def test_rows_leave_out_what_was_not_measured(results: Any) -> None:
    runs = results.Results([seen("Generate"), seen("grpc.aio")])
    rows = results.rows_of(runs, {BASE: ("Generate", "grpc.aio", "C++ gRPC")})
    assert [row[2] for row in rows] == ["Generate", "grpc.aio"]
    assert all(len(row) == len(results.HEADER) for row in rows)
    assert rows[0][5:8] == ["", "", 1.0]  # no TCP lines, no C++: no R1, no R2


def test_most_delivered_is_taken_over_loads(results: Any) -> None:
    runs = results.Results(
        [seen("Generate"), seen("Generate", load=(256, 5.0), tokens_per_s=40_000.0)]
    )
    ((side, rate, _, load),) = results.most_delivered(runs, [BASE, (256, 5.0)])
    assert (side, rate, load) == ("Generate", 40_000.0, "256 x 5 ms")


def test_checks_tell_misses_and_leave_out_what_is_unknown(results: Any) -> None:
    runs = results.Results(
        [
            seen(side, server_us=us, delay_p99_ms=25.0, round_index=number)
            for side, us in (("Generate", 40.0), ("grpc.aio", 30.0))
            for number in range(3)
        ]
    )
    checks = {check.name: check for check in results.checks_of(runs, engine(results, 1.5))}
    over = checks["Generate, 256 x 20 ms: CPU per message over grpc.aio"]
    assert over.value == pytest.approx(4 / 3)
    assert over.holds is False
    assert checks["Generate, 256 x 20 ms: p99 delay"].holds is False
    assert checks["Generate, 256 x 20 ms: delivered"].holds
    assert not checks["engine process, 256 streams: link and events per token"].holds
    assert not any("Multiplex" in name for name in checks)
