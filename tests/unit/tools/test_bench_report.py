"""What `penstock bench` plans and checks before it sends requests, and what it reports."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.client import KeepalivePolicy, Model, ModelLimits, ModelState
from penstock.server.cli.connection import UsageError
from penstock.server.settings.sources import BadSetting
from penstock.tools.bench.figures import figures_of
from penstock.tools.bench.fleet import LoadRun, merged_run
from penstock.tools.bench.options import check_options, plans_for, plans_of, sender_of
from penstock.tools.bench.pipe import WorkerDone
from penstock.tools.bench.plan import Arrivals, LoadPlan
from penstock.tools.bench.recorder import LoadRecorder
from penstock.tools.bench.report import document_of, figure_lines, sweep_lines, write_page
from penstock.tools.bench.sender import SenderConfig
from penstock.tools.command_line import build_parser
from support.load_events import finished, plan

TRACE = """\
{"arrival_s": 0, "prompt_tokens": 10, "output_tokens": 4, "priority": 2, "deadline_s": 3}
{"arrival_s": 1, "prompt_tokens": 20, "output_tokens": 5, "tenant": "a"}
{"arrival_s": 90, "prompt_tokens": 30, "output_tokens": 6}
"""


def model(**limits: Any) -> Model:
    chosen: dict[str, Any] = {"vocab_size": 500, "max_total_tokens": 1000, **limits}
    return Model(
        name="demo",
        aliases=(),
        is_default=True,
        state=ModelState.READY,
        limits=ModelLimits(**chosen),
        keepalive=KeepalivePolicy(),
        features=(),
        adapters=(),
        executor="simulated",
        ready_at_s=None,
    )


def parsed(*arguments: object) -> argparse.Namespace:
    return build_parser().parse_args(["bench", *map(str, arguments)])


def plans(*arguments: object, **limits: Any) -> list[LoadPlan]:
    args = parsed(*arguments)
    return plans_for(model(**limits), plans_of(args, check_options(args), seed=7))


def measured(made: LoadPlan, ttft_s: float) -> LoadRun:
    recorder = LoadRecorder.from_plan(made)
    for due_s in (1.0, 2.0):
        record = recorder.begin(due_s, due_s, 2)
        record.tokens(due_s + ttft_s, 1)
        record.tokens(due_s + ttft_s + 0.01, 1)
        record.finished(due_s + ttft_s + 0.01, finished())
    recorder.begin(3.0, 3.0, 2).failed("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    recorder.begin(3.0, 3.0, 2).failed("UNAVAILABLE", "")
    done = WorkerDone(recorder=recorder, cpu_share=0.25)
    return merged_run(made, [done])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE, encoding="utf-8")
    return path


def test_each_rate_is_a_run_with_its_own_prompts() -> None:
    made = plans("--rates", "1,2.5", "--arrivals", "constant", "--target-itl-ms", 50)

    assert [(one.arrivals, one.rate_per_s) for one in made] == [
        (Arrivals.CONSTANT, 1.0),
        (Arrivals.CONSTANT, 2.5),
    ]
    assert [one.run_index for one in made] == [0, 1]
    assert {one.seed for one in made} == {7}
    assert made[0].targets.itl_s == 0.05


def test_a_trace_without_a_rate_is_replayed_for_the_duration_of_the_run(trace: Path) -> None:
    [made] = plans("--trace", trace, "--warm-up-s", 0, "--max-prompt-tokens", 15)

    assert made.arrivals is Arrivals.REPLAY
    assert [row.arrival_s for row in made.rows] == [0.0, 1.0]
    assert [row.num_prompt_tokens for row in made.rows] == [10, 15]
    assert (made.rows[0].priority, made.rows[0].deadline_s) == (2, 3.0)
    # A tenant without a metadata key is never sent.
    assert made.rows[1].tenant == ""


def test_a_trace_is_replayed_faster_and_with_its_tenants(trace: Path) -> None:
    [made] = plans("--trace", trace, "--load", 10, "--tenant-metadata-key", "x-tenant")
    [shared] = plans("--trace", trace, "--tenant", "b", "--tenant-metadata-key", "x-tenant")

    assert [row.arrival_s for row in made.rows] == [0.0, 0.1, 9.0]
    assert [row.tenant for row in made.rows] == ["", "a", ""]
    assert {row.tenant for row in shared.rows} == {""}
    assert shared.tenant == "b"


def test_lengths_of_a_trace_are_used_with_a_rate(trace: Path) -> None:
    [made] = plans("--trace", trace, "--rates", 3)

    assert made.arrivals is Arrivals.POISSON
    assert [row.num_output_tokens for row in made.rows] == [4, 5, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--rates, --concurrency or --trace must be given"),
        (("--rates", 1, "--load", 2), "--load requires --trace"),
        (("--rates", 1, "--format", "azure"), "--format requires --trace"),
        (("--concurrency", 1, "--arrivals", "poisson"), "--arrivals requires --rates"),
        (
            ("--trace", "TRACE", "--prompt-tokens", 5),
            "--prompt-tokens cannot be combined with --trace",
        ),
        (("--trace", "TRACE", "--rates", 1, "--load", 2), "--load cannot be combined with --rates"),
        (("--trace", "TRACE", "--start-s", 99), "the trace has no requests"),
        (("--trace", "TRACE", "--load", 0), "--load must be in"),
        (("--rates", 1, "--prompt-tokens", "x"), "--prompt-tokens: must be N"),
        (("--rates", 1, "--duration-s", 0), "--duration-s must be above 0"),
        (("--rates", 1, "--duration-s", 1e9), "--warm-up-s + --duration-s + --drain-s must be"),
        (("--rates", 1, "--requests", 0), "--requests must be in"),
        (("--rates", 1e9), "--rates must be above 0 and at most 1000000"),
        (("--rates", "1,0"), "--rates must be above 0"),
        (("--rates", "1,inf"), "--rates must be above 0"),
        (("--rates", "1,x"), "--rates must be a number, not 'x'"),
        (("--rates", ",".join("1" * 65)), "--rates must be at most 64 numbers"),
        (("--concurrency", 0), "--concurrency must be in"),
        (("--rates", 1, "--tenant", "a"), "--tenant-metadata-key must be given"),
        (
            ("--rates", 1, "--prompt-tokens", 999),
            "--prompt-tokens, --output-tokens: a prompt and its output may have 1,063 tokens; demo"
            " accepts at most 1,000",
        ),
        (("--rates", 1, "--json", "/none/x.json"), "--json: folder /none does not exist"),
        (("--rates", 1, "--json", "/dev"), "--json: /dev is a folder; name a file"),
        (("--rates", 1, "--report", "TRACE"), "trace.jsonl is not a folder"),
        (("localhost", "more", "--rates", 1), "more: options of serve require --own-service"),
    ],
)
def test_bad_usage_is_reported_by_its_flag(
    trace: Path, arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises((UsageError, BadSetting)) as reported:
        plans(*(trace if argument == "TRACE" else argument for argument in arguments))

    assert message in str(reported.value)


def test_a_model_without_a_vocabulary_size_is_rejected() -> None:
    with pytest.raises((UsageError, BadSetting), match="vocabulary"):
        plans("--rates", 1, vocab_size=None)


def test_another_machine_is_rejected_unless_it_is_meant() -> None:
    args = parsed("--rates", 1)
    with pytest.raises((UsageError, BadSetting), match="--allow-remote"):
        sender_of(args, "gpu.example.org:50051")

    meant = parsed("--rates", 1, "--allow-remote", "--multiplex", "--channels", 4)
    config = sender_of(meant, "gpu.example.org:50051")
    assert (config.is_multiplex, config.num_channels) == (True, 4)


def test_the_table_of_several_loads_fits_a_terminal() -> None:
    made = plans("--concurrency", "9999,100")

    lines = sweep_lines([figures_of(measured(one, 999.0)) for one in made])

    assert lines[0].split()[:3] == ["load", "done/s", "good/s"]
    assert max(map(len, lines)) <= 100


def test_only_an_open_loop_has_an_offered_rate(tmp_path: Path) -> None:
    [at_rate] = plans("--rates", 10, "--warm-up-s", 0)
    [closed] = plans("--concurrency", 4, "--requests", 4)
    offered = " of 0.13 offered, "

    for made, is_open in ((at_rate, True), (closed, False)):
        runs = [measured(made, 0.5)] * 2
        figures = [figures_of(run) for run in runs]
        text = "\n".join(figure_lines(figures[0]))
        assert (offered in text) is is_open
        document = document_of(SenderConfig(address="localhost"), model(), runs, figures)
        assert (document["points"][0]["offered_per_s"] is not None) is is_open
        write_page(tmp_path / "page.html", document, runs, figures)
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert ("offered/s" in page) is is_open
    assert figure_lines(figures_of(measured(closed, 0.5)))[:3] == [
        "load         closed, 4 concurrent, 3.0 s of sending and 0.0 s of draining",
        "requests     4 due: 2 completed, 2 failed",
        "goodput      0.67 requests/s, 50.0% of all within targets",
    ]


def test_json_has_null_for_values_that_were_not_measured() -> None:
    made = plan()
    idle = LoadRecorder.from_plan(made)
    run = merged_run(made, [WorkerDone(recorder=idle, cpu_share=0.0)])
    document = document_of(SenderConfig(address="localhost"), model(), [run], [figures_of(run)])

    read = json.loads(json.dumps(document, allow_nan=False))
    assert read["points"][0]["ttft"]["p99_s"] is None
    assert read["points"][0]["ttft"]["num"] == 0
    assert read["settings"]["prompt_tokens"] == "128"
