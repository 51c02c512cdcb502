"""What a load recorder counts, from which time on, and what several recorders count together."""

import math
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.client import FinishReason
from penstock.server.observe.recording.trace import TraceRequest
from penstock.tools.bench.figures import figures_of, warnings_of
from penstock.tools.bench.fleet import IdleCores, merged_run
from penstock.tools.bench.latency_histogram import LatencyHistogram
from penstock.tools.bench.pipe import WorkerDone, decode, encode
from penstock.tools.bench.plan import Arrivals
from penstock.tools.bench.recorder import LoadRecorder
from penstock.tools.targets import Targets
from support.load_events import finished, plan


def histogram_of(*durations_s: float) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for duration_s in durations_s:
        histogram.record(duration_s)
    return histogram


def served(recorder: LoadRecorder, due_s: float, *at_s: float, sent_s: float | None = None) -> None:
    """Record a request that gets one token at each of the times `at_s`, and that finishes with the
    last one.
    """
    record = recorder.begin(due_s, due_s if sent_s is None else sent_s, len(at_s))
    for moment_s in at_s:
        record.tokens(moment_s, 1)
    record.finished(at_s[-1], finished(len(at_s)))


def done(recorder: LoadRecorder, *, cpu_share: float = 0.1) -> WorkerDone:
    return WorkerDone(recorder=recorder, cpu_share=cpu_share)


def test_percentiles_are_within_a_thousandth() -> None:
    histogram = histogram_of(*(number / 1e3 for number in range(1, 1001)))

    for percent, expected_s in ((50.0, 0.5), (90.0, 0.9), (99.0, 0.99), (100.0, 1.0)):
        assert histogram.percentile_s(percent) == pytest.approx(expected_s, rel=1e-3)
    assert histogram.mean_s == pytest.approx(0.5005)
    assert histogram.max_s == 1.0


def test_values_beyond_the_range_of_a_histogram_are_counted() -> None:
    histogram = histogram_of(-0.001, 7200.0)

    assert len(histogram) == 2
    assert histogram.max_s == 7200.0
    assert histogram.percentile_s(0.0) == 0.0
    assert histogram.percentile_s(100.0) == pytest.approx(3600.0, rel=1e-3)


def test_histograms_merge_after_a_transfer_between_processes() -> None:
    one, two = histogram_of(0.1, 0.2), histogram_of(0.3, 0.4, 4.0)
    one.merge(LatencyHistogram.from_state(*two.state()))

    assert len(one) == 5
    assert one.percentile_s(50.0) == pytest.approx(0.3, rel=1e-3)
    assert one.mean_s == pytest.approx(1.0)
    assert one.max_s == 4.0


def test_durations_count_from_when_a_request_was_due() -> None:
    recorder = LoadRecorder.from_plan(plan())

    served(recorder, 1.0, 3.5, 3.6, sent_s=3.0)

    assert recorder.ttft.max_s == pytest.approx(2.5)
    assert recorder.total.max_s == pytest.approx(2.6)
    assert recorder.itl.max_s == pytest.approx(0.1)
    assert recorder.lateness.max_s == pytest.approx(2.0)
    assert recorder.queue.max_s == pytest.approx(0.25)


def test_a_message_of_several_tokens_is_one_gap_and_counts_all_tokens() -> None:
    recorder = LoadRecorder.from_plan(plan())
    record = recorder.begin(0.0, 0.0, 5)
    record.tokens(1.0, 1)
    record.tokens(1.4, 0)
    record.tokens(2.0, 4)
    record.finished(2.0, finished(5))

    assert len(recorder.itl) == 1
    assert recorder.itl.max_s == pytest.approx(1.0)
    assert recorder.tpot.max_s == pytest.approx(0.25)
    assert recorder.num_output_tokens == 5
    assert recorder.num_short == 0


def test_a_request_of_the_warm_up_is_in_no_figure_and_a_later_one_in_all() -> None:
    made = plan(warm_up_s=1.0, duration_s=2.0)
    recorder = LoadRecorder.from_plan(made)

    served(recorder, 0.9, 0.95, 1.1, 1.2)  # due in the warm-up, ends after it
    served(recorder, 2.9, 2.95, 5.0)  # ends in the drain
    recorder.begin(0.5, 0.5, 1).failed("UNAVAILABLE", "")

    assert (recorder.num_due, recorder.num_completed, recorder.num_failed) == (1, 1, 0)
    assert len(recorder.ttft) == 1
    figures = figures_of(merged_run(made, [done(recorder)]))
    assert (figures.sending_s, figures.duration_s) == (2.0, 4.0)
    assert figures.offered_per_s == 1 / 2.0
    assert figures.requests_per_s == 1 / 4.0
    assert figures.output_tokens_per_s == 2 / 4.0
    assert figures.prompt_tokens_per_s == 8 / 4.0


def test_a_good_request_meets_ttft_and_nearly_all_gap_targets() -> None:
    recorder = LoadRecorder.from_plan(plan(targets=Targets(ttft_s=1.0, itl_s=0.1), duration_s=60.0))

    served(recorder, 0.0, 1.0, 1.09)
    served(recorder, 0.0, 1.01, 1.09)
    served(recorder, 0.0, 0.5, 0.65)
    # One slow gap of a hundred is forgiven, two are not.
    served(recorder, 0.0, *(number * 0.05 for number in range(100)), 6.0)
    served(recorder, 0.0, *(number * 0.05 for number in range(99)), 6.0, 8.0)

    assert recorder.num_completed == 5
    assert recorder.num_good == 2


def test_an_output_of_an_unexpected_length_or_end_is_reported() -> None:
    recorder = LoadRecorder.from_plan(plan())
    for num_sent, reason in (
        (2, FinishReason.LENGTH),
        (1, FinishReason.LENGTH),
        (2, FinishReason.TIME_LIMIT),
    ):
        record = recorder.begin(0.0, 0.0, 2)
        record.tokens(0.1, num_sent)
        record.finished(0.1, finished(num_sent, reason=reason))

    figures = figures_of(merged_run(plan(), [done(recorder)]))
    assert figures.num_short == 2
    assert any("a number of tokens other than" in text for text in warnings_of(figures))


def test_processes_add_up() -> None:
    parts = [LoadRecorder.from_plan(plan()), LoadRecorder.from_plan(plan())]
    served(parts[0], 0.0, 0.1, 0.15)
    parts[0].begin(1.0, 1.0, 1).failed("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    served(parts[1], 0.0, 0.3, 0.35)
    parts[1].begin(1.0, 1.0, 1).failed("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    parts[1].begin(1.0, 1.0, 1).failed("UNAVAILABLE", "")
    parts[1].begin(1.0, 1.0, 1).abandoned()
    parts[1].drop(2.0)

    received = [cast("WorkerDone", decode(encode(done(part)))) for part in parts]
    figures = figures_of(merged_run(plan(), received))

    assert figures.num_due == 7
    assert (figures.num_completed, figures.num_failed) == (2, 3)
    assert (figures.num_dropped, figures.num_unfinished) == (1, 1)
    unfinished = (
        "1 requests were open when the run ended; total time, throughput and tokens/s exclude"
    )
    assert any(text.startswith(unfinished) for text in warnings_of(figures))
    assert [(error.status, error.reason, error.num) for error in figures.errors] == [
        ("RESOURCE_EXHAUSTED", "QUEUE_FULL", 2),
        ("UNAVAILABLE", "", 1),
    ]
    assert figures.ttft.num == 2
    assert figures.ttft.max_s == pytest.approx(0.3)
    assert figures.requests_per_s == pytest.approx(2 / 10.0)
    assert figures.output_tokens_per_s == pytest.approx(4 / 10.0)
    assert figures.good_share == pytest.approx(2 / 7)
    assert figures.cached_prompt_share == 0.5
    assert figures.cpu_shares == (0.1, 0.1)


ROWS = (TraceRequest(arrival_s=0.0, num_prompt_tokens=1, num_output_tokens=2),)
CLOSED = {"arrivals": Arrivals.CLOSED, "concurrency": 1}


@pytest.mark.parametrize(
    ("settings", "sending_s", "duration_s"),
    [
        ({}, 10.0, 10.0),
        ({"warm_up_s": 0.5}, 10.0, 10.0),
        ({"max_requests": 3}, 10.0, 10.0),
        # Ten per second: the next one would be due 0.1 s after the last one.
        ({"max_requests": 2}, 2.1, 2.5),
        ({"max_requests": 2, "warm_up_s": 0.5}, 1.6, 2.0),
        ({"max_requests": 2, "arrivals": Arrivals.POISSON, "rate_per_s": 10.0}, 2.0, 2.5),
        ({"arrivals": Arrivals.REPLAY, "rows": ROWS}, 2.0, 2.5),
        # A closed loop that the service stalls is still sending. Its warm-up is a separate run.
        ({**CLOSED, "warm_up_s": 0.5}, 10.0, 10.0),
        ({**CLOSED, "warm_up_s": 0.5, "max_requests": 2}, 2.0, 2.5),
    ],
)
def test_rates_are_over_the_time_in_which_requests_were_due_and_completed(
    settings: dict[str, Any], sending_s: float, duration_s: float
) -> None:
    made = plan(**settings)
    recorder = LoadRecorder.from_plan(made)
    served(recorder, 1.0, 1.1, 1.2)
    served(recorder, 2.0, 2.1, 2.5)

    run = merged_run(made, [done(recorder)])

    assert run.sending_s == pytest.approx(sending_s)
    assert run.duration_s == duration_s


def test_a_request_that_does_not_complete_does_not_lengthen_the_measurement() -> None:
    recorder = LoadRecorder.from_plan(plan())
    served(recorder, 9.0, 9.5, 11.0)
    recorder.begin(9.5, 9.5, 2).abandoned()
    recorder.drop(9.9)

    assert merged_run(plan(), [done(recorder)]).duration_s == 11.0


@pytest.mark.parametrize("max_requests", [None, 8])
def test_rates_do_not_contradict_the_counts(max_requests: int | None) -> None:
    """Of ten requests, two are in the warm-up, two meet the targets and one fails."""
    made = plan(warm_up_s=2.0, max_requests=max_requests, targets=Targets(ttft_s=1.0, itl_s=0.1))
    recorder = LoadRecorder.from_plan(made)
    for due_s in map(float, range(10)):
        if due_s == 5.0:
            recorder.begin(due_s, due_s, 1).failed("UNAVAILABLE", "")
        else:
            ttft_s = 0.5 if due_s in (3.0, 4.0) else 8.0
            served(recorder, due_s, due_s + ttft_s, due_s + ttft_s + 0.05)

    f = figures_of(merged_run(made, [done(recorder)]))

    assert (f.num_good, f.num_completed, f.num_due) == (2, 7, 8)
    assert f.goodput_per_s < f.requests_per_s < f.offered_per_s
    assert f.goodput_per_s * f.duration_s == pytest.approx(f.num_good)
    assert f.requests_per_s * f.duration_s == pytest.approx(f.num_completed)
    assert f.offered_per_s * f.sending_s == pytest.approx(f.num_due)


def test_a_closed_loop_has_no_offered_rate() -> None:
    made = plan(arrivals=Arrivals.CLOSED, concurrency=2, max_requests=2)
    recorder = LoadRecorder.from_plan(made)
    served(recorder, 0.0, 0.1)
    served(recorder, 0.0, 0.2)

    figures = figures_of(merged_run(made, [done(recorder)]))

    assert math.isnan(figures.offered_per_s)
    assert figures.requests_per_s == pytest.approx(2 / 0.2)
    assert figures.goodput_per_s == figures.requests_per_s


def test_a_client_that_distorts_its_figures_is_reported() -> None:
    honest, late = LoadRecorder.from_plan(plan()), LoadRecorder.from_plan(plan())
    served(honest, 0.0, 0.5, sent_s=0.01)
    served(late, 0.0, 0.5, sent_s=0.2)

    assert warnings_of(figures_of(merged_run(plan(), [done(honest)]))) == []
    [warning] = warnings_of(figures_of(merged_run(plan(), [done(late)])))
    assert "the client sent late: p99 200.0 ms" in warning
    [warning] = warnings_of(figures_of(merged_run(plan(), [done(honest, cpu_share=0.95)])))
    assert "95% of a core" in warning


@pytest.mark.parametrize(
    ("num_idle_cores", "advice"),
    [
        (None, "raise --processes"),
        (0.9, "raise --processes"),
        (0.04, "no core of this machine was idle: lower the load, or run the client on another"),
    ],
)
def test_more_client_processes_are_advised_only_if_cores_are_idle(
    num_idle_cores: float | None, advice: str
) -> None:
    recorder = LoadRecorder.from_plan(plan())
    served(recorder, 0.0, 0.5, sent_s=0.2)

    run = merged_run(plan(), [done(recorder, cpu_share=0.95)], num_idle_cores)

    for warning in warnings_of(figures_of(run)):
        assert f"; {advice}" in warning


def test_idle_cores_are_counted_from_the_start_of_the_run(tmp_path: Path) -> None:
    uptime = tmp_path / "uptime"
    uptime.write_text("100.0 350.0\n", encoding="ascii")
    idle = IdleCores(uptime)
    assert idle.mean() is None

    uptime.write_text("110.0 365.0\n", encoding="ascii")
    assert idle.mean() == 1.5
    assert IdleCores(tmp_path / "none").mean() is None


def test_nothing_measured_is_no_figure_and_no_fault() -> None:
    figures = figures_of(merged_run(plan(), [done(LoadRecorder.from_plan(plan()))]))

    assert figures.num_due == 0
    assert figures.ttft.p99_s != figures.ttft.p99_s
    assert warnings_of(figures) == []


def test_a_late_client_without_first_tokens_has_no_median_to_compare_with() -> None:
    recorder = LoadRecorder.from_plan(plan())
    recorder.begin(0.0, 0.2, 2).failed("INTERNAL", "")

    [warning] = warnings_of(figures_of(merged_run(plan(), [done(recorder)])))
    assert warning.startswith("100.0% of the requests failed")


def test_all_percentiles_at_once_are_the_single_ones() -> None:
    histogram = histogram_of(*[0.1] * 97, 0.2, 7200.0, 5.0)

    assert histogram.percentiles_s() == [histogram.percentile_s(float(p)) for p in range(101)]
    assert LatencyHistogram().percentiles_s() == []
