"""Invalid arguments of `penstock simulate` and `plan` give one line that names them,
and exit code 2.
"""

import gzip
from pathlib import Path

import pytest

from penstock.server.cli import connection
from penstock.tools.command_line import main

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.0,40,4\n"
TARGET = ("--target-ttft-p99-s", "1", "--target-itl-p99-ms", "100")
NESTED = "[" * 100_000
HUGE = "9" * 20


def rejection(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must exit with code 2; return its error, which must be one line or begin
    with the usage.
    """
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr().err
    assert code == 2, printed
    assert printed.count("\n") == 1 or printed.startswith("usage:"), printed
    return printed


def recorded(**fields: object) -> str:
    values = {"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 2} | fields
    inside = ", ".join(f'"{name}": {value}' for name, value in values.items())
    return f"{{{inside}}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + ROW + f"2023-11-16 18:15:47,{HUGE},4\n", "trace:3: ContextTokens must be at most"),
        (
            HEAD + ROW + "2023-11-16 18:15:47,-3,4\n",
            "trace:3: ContextTokens must be at least 1, not",
        ),
        (HEAD + ROW + f"2023-11-16 18:15:47,4,{HUGE}\n", "trace:3: GeneratedTokens must be at"),
        (recorded() + NESTED + "\n", "trace:2: Expected `object`, got `array`"),
        (recorded(arrival_s="1" + "0" * 400), "trace:1: Number out of range - at `$.arrival_s`"),
        (recorded() + recorded(arrival_s=1e17), "trace:2: arrival_s must be at most"),
        (recorded(tenant='"\\ud800"'), "trace:1: not JSON"),
        (recorded(priority=HUGE), "trace:1: priority must be in"),
        (recorded(prefix_block_tokens=HUGE), "trace:1: prefix_block_tokens must be at most"),
    ],
    ids=lambda value: value[:40],
)
def test_a_field_of_a_trace_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    trace = tmp_path / "trace"
    trace.write_text(text, encoding="utf-8")

    assert message in rejection(capsys, "simulate", "--trace", trace)


@pytest.mark.parametrize("broken_at", [2, 30])
def test_a_broken_compressed_trace_is_not_of_its_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken_at: int
) -> None:
    trace = tmp_path / "trace.csv.gz"
    data = bytearray(gzip.compress((HEAD + ROW).encode()))
    data[broken_at - 2 : broken_at + 2] = b"\xff\xff\xff\xff"
    trace.write_bytes(data)

    assert "trace.csv.gz:1: is not a gzip file" in rejection(capsys, "simulate", "--trace", trace)


STEP = '{"num_prefill_tokens": %s, "num_decodes": 0, "num_context_tokens": 1, "seconds": 1}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'{{"x": {NESTED}', "steps:1: not JSON: it is nested too deep"),
        (STEP % ("1" + "0" * 400), "steps:1: num_prefill_tokens must be in 0 .. "),
        (STEP % "1.5", "steps:1: Expected `int`, got `float` - at `$.num_prefill_tokens`"),
        (b"\xff", "steps: is not UTF-8 text"),
    ],
    ids=["nested", "huge", "fraction", "bytes"],
)
def test_an_invalid_file_of_steps_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, message: str
) -> None:
    steps = tmp_path / "steps"
    steps.write_bytes(text if isinstance(text, bytes) else text.encode())

    assert message in rejection(capsys, "simulate", "--calibrate-from", steps)


COST = '{"step_s": 1, "prefill_token_s": 0, "decode_slot_s": 0, "context_token_s": 0}'
SMALL = ("--synthetic", '{"duration_s": 1, "rate_per_s": 5}')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--load", "1e-308"), "--load must be in"),
        (("--load", "0"), "--load must be in"),
        (("--num-blocks", "99999999999"), "--num-blocks must be in 1..16777216, not 99999999999"),
        (("--num-blocks", "0"), "--num-blocks must be in 1..16777216, not 0"),
        (("--max-num-seqs", "99999999999"), "--max-num-seqs must be in 1..65536"),
        (("--max-seq-len", "99999999999"), "--max-seq-len must be in 2..16777216"),
        (("--replicas", "100000"), "--replicas must be in 1..1024"),
        (
            ("--replicas", "1024", "--num-blocks", "99999"),
            "--replicas x --num-blocks must be at most",
        ),
        (("--max-num-batched-tokens", "0"), "--max-num-batched-tokens must be at least 1"),
        (
            ("--max-num-batched-tokens", "9"),
            "--max-num-batched-tokens must be at least --max-num-seqs (256), not 9",
        ),
        (("--front-ms", "-5"), "--front-ms must be at least 0, not -5"),
        (("--target-itl-ms", "-5"), "--target-itl-ms must be above 0, not -5"),
        (("--target-ttft-s", "-5"), "--target-ttft-s must be above 0, not -5"),
        (("--max-requests", "0"), "--max-requests must be at least 1"),
        (("--deadline-share", "2"), "--deadline-share must be in"),
        (("--cost", '{"step_s": 1}'), "--cost: prefill_token_s, decode_slot_s, context_token_s mi"),
        (("--cost", "[1"), "--cost is not valid JSON"),
        (("--cost", COST.replace("1", "1e300")), "--cost.step_s must be in 0..3600"),
        (("--cost", "[1]"), "--cost must be an object, not an array"),
        (("--scheduler", '{"aging_s": 0}'), "--scheduler: aging_s must be above 0"),
        (("--scheduler", '{"target_itl_ms": 0}'), "target_itl_ms must be above 0, not 0.0"),
        (("--scheduler", '{"target_itl_s": 1}'), "is unknown; did you mean target_itl_ms?"),
        (("--scheduler", '{"max_num_waiting": 0.5}'), "max_num_waiting must be an integer, not"),
        (("--scheduler", '{"tenant_weights": 1}'), "tenant_weights must be an object, not 1"),
        (("--scheduler", '{"step_cost": {"step_s": 1}}'), "step_cost: prefill_token_s, decode"),
        (
            ("--scheduler", '{"x": 1}'),
            "--scheduler: x is unknown; the most similar are max_lookahead, max_overtake_s, ",
        ),
        (
            ("--max-num-batched-tokens", "512", "--scheduler", '{"max_num_batched_tokens": 512}'),
            "--scheduler: max_num_batched_tokens is given by its own flag too",
        ),
        (
            ("--no-prefix-caching", "--scheduler", '{"eviction": "lru"}'),
            "--scheduler: eviction cannot be combined with --no-prefix-caching",
        ),
        (("--scheduler", NESTED), "--scheduler: not JSON: it is nested too deep"),
        (("--scheduler", '{"aging_s": 1, "aging_s": 2}'), "duplicate key 'aging_s'"),
        (("--tenants", "a=1,a=2"), "--tenants: 'a' occurs twice"),
        (("--tenants", "\udcff=1"), "--tenants: "),
        (
            ("--policy", "fair", "--batch-size", "4"),
            "--batch-size has no effect with the policy fair",
        ),
        (("--policy", "static", "--batch-wait-s", "4"), "--batch-wait-s has no effect with the"),
        (("--overload-factor", "2"), "--overload-factor has no effect with the router round_robin"),
        (("--overload-slack", "2"), "--overload-slack has no effect with the router round_robin"),
        (("--min-prefix-share", "0"), "--min-prefix-share has no effect with the router"),
        (("--load-signal", "tokens"), "--load-signal has no effect with the router round_robin"),
        (
            ("--router", "least_loaded", "--max-index-tokens", "9"),
            "--max-index-tokens has no effect with the router least_loaded",
        ),
        (
            ("--router", "least_loaded", "--load-signal-delay-s", "-1"),
            "--load-signal-delay-s must be at least 0",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_an_invalid_flag_is_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in rejection(capsys, "simulate", *SMALL, *arguments)


@pytest.mark.parametrize(
    ("synthetic", "message"),
    [
        ('{"rate_per_s": 1e300}', "rate_per_s x duration_s must be at most"),
        ('{"rate_per_s": 1, "duration_s": 1e9}', "rate_per_s x duration_s must be at most"),
        ('{"arrivals": "mmpp", "mean_state_s": 1e-300}', "mean_state_s must be at least"),
        ('{"arrivals": "gamma", "burstiness": 1e300}', "burstiness must be in"),
        ('{"arrivals": "gamma", "burstiness": 1e-300}', "burstiness must be in"),
        (
            '{"mean_prompt_tokens": 1e300}',
            "mean_prompt_tokens must be above 0 and at most 16777216",
        ),
        ('{"max_output_tokens": 99999999999}', "max_output_tokens must be in 1..16777216"),
        ('{"tenants": [{"name": "a"}, {"name": "a"}]}', "tenants: 'a' occurs twice"),
        ('{"tenants": [{"name": "\\ud800"}]}', "name must be Unicode text"),
        (NESTED, "not JSON: it is nested too deep"),
    ],
    ids=lambda value: value[:44],
)
def test_an_invalid_field_of_synthetic_traffic_is_named(
    capsys: pytest.CaptureFixture[str], synthetic: str, message: str
) -> None:
    printed = rejection(capsys, "simulate", "--synthetic", synthetic)
    assert "--synthetic: " in printed
    assert message in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-replicas", "100000"), "--max-replicas must be in 1..1024"),
        (("--target-itl-p99-ms", "-5"), "--target-itl-p99-ms must be above 0"),
        (("--price", "-5"), "--price must be above 0, not -5.0"),
        (("--target-good-share", "2"), "--target-good-share must be above 0 and at most 1"),
        (("--window-s", "0"), "--window-s must be above 0"),
        (
            ("--candidate", '{"name": "a"}', "--candidate", "{"),
            "--candidate: [1] is not valid JSON",
        ),
        (
            ("--candidate", '{"name": "big", "num_blocks": 0}'),
            "--candidate: [0].num_blocks must be in 1..16777216, not 0 (candidate 'big')",
        ),
        (("--candidate", '{"name": "a", "price": -1}'), "[0].price must be above 0, not -1.0"),
        (("--candidate", '{"name": "\\ud800"}'), "--candidate: name must be Unicode text"),
        (("--batch-size", "4"), "--batch-size has no effect with the policy fair"),
        (("--start-s", "1000"), "the trace has no requests"),
        (("--candidate", "{}"), "--candidate: [0].name must be a string"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_an_invalid_flag_of_a_plan_is_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in rejection(capsys, "plan", *SMALL, *TARGET, *arguments)


def test_a_batch_size_is_for_the_candidates_that_have_batches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(
        [
            *("plan", *SMALL, *TARGET, "--batch-size", "4", "--curve-requests", "0"),
            *("--candidate", '{"name": "a", "policy": "static"}', "--max-replicas", "1"),
        ]
    )
    assert code in (0, 1), capsys.readouterr().err


def test_a_long_pause_between_arrivals_costs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    trace.write_text(recorded() + recorded(arrival_s=1.7e9), encoding="utf-8")

    assert main(["simulate", "--trace", str(trace), "--report", str(tmp_path / "r")]) == 0
    assert "requests     2 in 1,700,000,000.0 s" in capsys.readouterr().out


def test_arrivals_that_a_low_load_moves_too_far_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    trace.write_text(recorded() + recorded(arrival_s=1.7e9), encoding="utf-8")

    printed = rejection(capsys, "simulate", "--trace", trace, "--load", "1e-6")
    assert "--load" in printed


def test_values_that_were_not_measured_are_a_dash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    trace.write_text(recorded(prompt_tokens=5000), encoding="utf-8")

    assert main(["simulate", "--trace", str(trace), "--max-seq-len", "64"]) == 0
    alone = capsys.readouterr().out
    two = ("--replicas", "2", "--max-seq-len", "64")
    assert main(["simulate", "--trace", str(trace), *two]) == 0
    out = alone + capsys.readouterr().out

    assert "prompt_too_long 1" in out
    assert "nan" not in out
    assert "prefix hits  - of prompt tokens" in out


def test_an_unforeseen_error_is_one_line_and_exit_code_70(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def action() -> int:
        raise KeyError("which\ncame")

    assert connection.run_reporting("plan", action) == 70
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "KeyError: 'which\\ncame' (test_simulate_rejections.py, line " in printed


@pytest.mark.parametrize("error", [MemoryError(), OverflowError("too large"), RecursionError("r")])
def test_inputs_beyond_the_resources_of_the_machine_are_one_line(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def action() -> int:
        raise error

    assert connection.run_reporting("simulate", action) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert type(error).__name__ in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "--load", "1"), "--trace, --synthetic or --calibrate-from must be given"),
        (("plan", *TARGET), "--trace or --synthetic must be given"),
    ],
)
def test_a_command_reports_what_it_needs(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in rejection(capsys, *arguments)
