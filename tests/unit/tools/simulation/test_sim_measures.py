"""How a simulation's histogram, fit of the cost model, optimal cache and charts are computed."""

import dataclasses
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from optimal_cache import optimal_hit_rate
from penstock.scheduler.cost_model import CostModel
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.charts import Chart, Series, svg
from penstock.tools.simulation.calibration import CalibrationError, calibrate, fit_cost
from penstock.tools.simulation.histogram import DurationHistogram


def test_percentiles_are_within_a_per_cent() -> None:
    values = np.random.default_rng(1).lognormal(-3.0, 1.5, 20_000)
    histogram = DurationHistogram()
    for part in np.split(values, 10):
        histogram.add(part)

    assert len(histogram) == 20_000
    assert histogram.mean_s == pytest.approx(values.mean())
    assert histogram.max_s == values.max()
    for percent in (1.0, 50.0, 99.0, 100.0):
        exact = np.percentile(values, percent, method="inverted_cdf")
        assert histogram.percentile_s(percent) == pytest.approx(exact, rel=0.006)


def test_a_histogram_of_nothing_and_of_zeros() -> None:
    histogram = DurationHistogram()
    assert math.isnan(histogram.percentile_s(50.0))
    assert math.isnan(histogram.mean_s)

    histogram.add(np.zeros(3))

    assert histogram.percentile_s(99.0) == 0.0


def steps(num: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.column_stack(
        (
            random.integers(0, 2048, num),
            random.integers(0, 256, num),
            random.integers(0, 10**6, num),
        )
    ).astype(np.float64)


def seconds_of(cost: CostModel, counts: np.ndarray) -> np.ndarray:
    return np.array(
        [
            cost.step_time_s(
                num_prefill_tokens=int(p), num_decodes=int(d), num_context_tokens=int(c)
            )
            for p, d, c in counts
        ]
    )


def test_a_fit_finds_the_cost() -> None:
    cost = CostModel(step_s=0.006, prefill_token_s=31e-6, decode_slot_s=17e-6, context_token_s=9e-9)
    counts = steps(300, 1)

    fit = fit_cost(counts, seconds_of(cost, counts))

    for name in ("step_s", "prefill_token_s", "decode_slot_s", "context_token_s"):
        assert getattr(fit.cost, name) == pytest.approx(getattr(cost, name), rel=1e-6)
    assert fit.r_squared == pytest.approx(1.0)
    assert fit.mean_error == pytest.approx(0.0, abs=1e-9)


def test_first_steps_and_pauses_are_excluded_and_reported() -> None:
    cost = CostModel(step_s=0.006, prefill_token_s=31e-6, decode_slot_s=17e-6, context_token_s=9e-9)
    counts = steps(300, 4)
    seconds = seconds_of(cost, counts) * np.random.default_rng(4).normal(1.0, 0.03, 300)
    paused = np.arange(0, 300, 20)
    honest_s = float(np.delete(seconds, paused).sum())
    seconds[paused] += 1.0

    fit = fit_cost(counts, seconds)

    assert (fit.num_steps, fit.num_left_out) == (285, 15)
    assert fit.left_out_share == pytest.approx(1.0 - honest_s / seconds.sum())
    assert fit.cost.step_s == pytest.approx(cost.step_s, rel=0.1)
    assert fit.cost.prefill_token_s == pytest.approx(cost.prefill_token_s, rel=0.05)
    assert fit.mean_error < 0.03
    # What is left takes as long together as it did.
    kept = np.delete(counts, paused, axis=0)
    assert seconds_of(fit.cost, kept).sum() == pytest.approx(honest_s)


def test_superlinear_prefill_does_not_distort_the_cost_of_decodes() -> None:
    """The cost of prefill is superlinear, but steps of decodes are still predicted within 15 %."""
    prefills = [(num, 0, num) for num in range(128, 2048, 64)]
    decodes = [(0, num, 300 * num) for num in range(1, 33)]
    counts = np.array(prefills + decodes * 4, dtype=np.float64)
    seconds = 0.004 + 2e-5 * counts[:, 0] * (1.0 + counts[:, 0] / 2048) + 1e-4 * counts[:, 1]

    fit = fit_cost(counts, seconds)

    of_decodes = seconds_of(fit.cost, np.array(decodes, dtype=np.float64))
    assert of_decodes == pytest.approx(0.004 + 1e-4 * np.arange(1, 33), rel=0.15)


def test_no_coefficient_is_negative() -> None:
    counts = steps(300, 2)
    # Plain least squares would find that more decode rows are faster.
    seconds = 0.02 + 30e-6 * counts[:, 0] - 40e-6 * counts[:, 1]

    fit = fit_cost(counts, seconds)

    assert fit.cost.decode_slot_s == 0.0
    assert fit.cost.prefill_token_s == pytest.approx(30e-6, rel=0.05)
    assert fit.r_squared < 1.0


def test_steps_are_read_from_a_file(tmp_path: Path) -> None:
    cost = CostModel(step_s=0.005, prefill_token_s=2e-5, decode_slot_s=0.0, context_token_s=0.0)
    counts = steps(50, 3)
    path = tmp_path / "steps.jsonl"
    lines = [
        json.dumps(
            {"num_prefill_tokens": p, "num_decodes": d, "num_context_tokens": c, "seconds": s}
        )
        for (p, d, c), s in zip(
            counts.astype(int).tolist(), seconds_of(cost, counts).tolist(), strict=True
        )
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    fit = calibrate(path)

    assert fit.num_steps == 50
    assert fit.cost.prefill_token_s == pytest.approx(2e-5)
    broken = lines[0].replace('"num_decodes": ', '"num_decodes": -')
    path.write_text(f"{lines[0]}\n{broken}\n", encoding="utf-8")
    with pytest.raises(CalibrationError, match=r":2: num_decodes must be in 0 \.\. "):
        calibrate(path)
    path.write_text(lines[0] + "\n", encoding="utf-8")
    with pytest.raises(CalibrationError, match="1 steps are too few"):
        calibrate(path)


def prompts(*ids: tuple[int, ...]) -> list[TraceRequest]:
    return [
        TraceRequest(
            arrival_s=float(i),
            num_prompt_tokens=10 * len(prefix),
            num_output_tokens=1,
            prefix_ids=prefix,
            prefix_block_tokens=10,
        )
        for i, prefix in enumerate(ids)
    ]


def test_the_best_eviction_by_hand() -> None:
    trace = prompts((1,), (2,), (3,), (1,), (2,), (1,))

    # Room for one: keep 1 from the start to its next use, then again. 2 hits of 6 prompts, each of
    # 10 tokens, of which one is always computed.
    one = optimal_hit_rate(trace, num_cache_tokens=10, block_size=1)
    two = optimal_hit_rate(trace, num_cache_tokens=29, block_size=1)
    none = optimal_hit_rate(trace, num_cache_tokens=9, block_size=1)

    assert one == pytest.approx(2 * 9 / 60)
    assert two == pytest.approx(3 * 9 / 60)
    assert none == 0.0


def test_the_best_eviction_breaks_no_chain_for_what_is_needed_as_late() -> None:
    trace = prompts((1, 2, 3), (4,), (1, 2, 3), (4,))

    # Room for three: 4 comes next but one, and takes the place of 3, not of the head. Then 1, 2
    # and 4 are found, 4 but for the token that is always computed.
    rate = optimal_hit_rate(trace, num_cache_tokens=30, block_size=1)

    assert rate == pytest.approx((20 + 9) / 80)


def test_only_an_unbroken_prefix_is_a_hit() -> None:
    trace = prompts((1, 2), (3, 2), (1, 2))

    rate = optimal_hit_rate(trace, num_cache_tokens=1000, block_size=5)

    # The second shares nothing from its start; the third all but its last, partly computed, block.
    assert rate == pytest.approx(15 / 60)


CHART = Chart(
    name="c",
    title="Load & <latency>",
    x_label="x",
    y_label="y",
    series=(
        Series(name="a", x=np.array([0.0, 1.0, 10.0]), y=np.array([1.0, math.nan, 3.0])),
        Series(name="b", x=np.arange(5000.0), y=np.arange(5000.0)),
    ),
    y_limit=4000.0,
    limit_text="twice the target",
)


def texts_of(chart: Chart) -> list[str]:
    return [e.text or "" for e in ET.fromstring(svg(chart)).iter() if e.tag.endswith("text")]


def test_a_chart_is_the_same_svg_in_every_run_with_axes_from_0() -> None:
    chart = dataclasses.replace(CHART, y_limit=math.inf)

    texts = texts_of(chart)

    assert svg(chart) == svg(chart)
    assert {"Load & <latency>", "x", "y", "a", "b"} <= set(texts)
    assert texts.count("0") == 2


def test_the_legend_has_every_name() -> None:
    lines = tuple(dataclasses.replace(CHART.series[0], name=name) for name in ("_batch", "web"))

    texts = "".join(texts_of(dataclasses.replace(CHART, series=lines)))

    assert "_batch" in texts
    assert "web" in texts


def test_many_points_are_drawn_as_a_small_path() -> None:
    noise = np.random.default_rng(1).exponential(500.0, 100_000)
    series = (Series(name="a", x=np.arange(100_000.0), y=noise),)

    assert len(svg(dataclasses.replace(CHART, series=series))) < 100_000


def test_a_value_beyond_the_limit_is_written_at_the_top() -> None:
    texts = texts_of(CHART)

    assert "Load & <latency>; \u25b2 over twice the target" in texts
    assert "to 4,999" in texts

    marked = Chart(
        name="m",
        title="m",
        x_label="x",
        y_label="y",
        series=(
            Series(name="a", x=np.array([1.0, 2.0, 3.0]), y=np.array([0.5, 30.0, math.inf])),
            Series(name="b", x=np.array([1.0, 2.0, 3.0]), y=np.array([0.5, 30.5, 2.0])),
        ),
        has_marks=True,
        y_limit=10.0,
        limit_text="the most",
    )
    assert {"30", "30.5", "\u221e", "m; \u25b2 over the most"} <= set(texts_of(marked))


@pytest.mark.parametrize("limit", [0.0, math.nan, 1e4, math.inf])
def test_a_limit_of_zero_or_beyond_all_values_is_ignored(limit: float) -> None:
    assert CHART.title in texts_of(dataclasses.replace(CHART, y_limit=limit))


def test_a_long_legend_counts_the_rest() -> None:
    names = [f"replica number {number}" for number in range(30)]
    nothing = np.zeros(0)
    series = tuple(Series(name=name, x=nothing, y=nothing) for name in names)

    texts = texts_of(dataclasses.replace(CHART, series=series))

    assert [text for text in texts if text in names] == names[:8]
    assert "and 22 more" in texts
