"""The report of `penstock verify`: its format, and which data it leaves out."""

import json
import socket
from typing import Any

import pytest

from penstock.server.cli.installation import Installation
from penstock.tools.verify.check_result import CheckOutcome, CheckResult
from penstock.tools.verify.report import (
    Report,
    StartedService,
    hidden_names,
    report_json,
    result_line,
    shown_argument,
    summary_lines,
)

GPU = {"name": "NVIDIA H100", "memory_mib": 81559, "compute_capability": "9.0"}
INSTALLATION = Installation(
    versions={"python": "3.12.3", "penstock": "0.1.0"},
    machine={
        "kernel": "Linux 6.8 x86_64",
        "num_cpus": 64,
        "gpus": [GPU, GPU],
        "driver": "570.124",
        "cuda": "12.8",
    },
)
FIGURES = {
    "num_streams": 32,
    "num_tokens": 2048,
    "tokens_per_s": 1234.5,
    **{f"{name}_p{p}_ms": p / 10 for name in ("ttft", "itl") for p in (50, 90, 99)},
}


def result(outcome: CheckOutcome, reason: str = "seen", name: str = "greedy") -> CheckResult:
    return CheckResult(name=name, outcome=outcome, reason=reason, duration_s=0.25)


def report(*results: CheckResult, **settings: Any) -> Report:
    return Report(
        time_utc="2026-11-21T01:00:00+00:00",
        installation=INSTALLATION,
        results=results,
        **settings,
    )


@pytest.mark.parametrize(
    ("outcomes", "is_passed"),
    [
        ([CheckOutcome.PASS], True),
        ([CheckOutcome.PASS, CheckOutcome.SKIP], True),
        ([CheckOutcome.PASS, CheckOutcome.FAIL], False),
        # Without a check that ran, nothing has passed.
        ([CheckOutcome.SKIP], False),
        ([], False),
    ],
)
def test_a_report_passes_if_a_check_passed_and_none_failed(
    outcomes: list[CheckOutcome], is_passed: bool
) -> None:
    made = report(*map(result, outcomes))

    assert made.is_passed is is_passed
    assert json.loads(report_json(made, has_paths=False))["is_passed"] is is_passed
    assert summary_lines(made)[-1].startswith("passed" if is_passed else "FAILED")


def test_the_json_report_contains_all_results() -> None:
    served = StartedService(
        arguments=("--model", "/home/ada/llama", "--executor=trtllm"),
        start_s=61.5,
        stop_s=2.0,
        exit_code=0,
        model_kind="Hugging Face model",
    )
    made = report(
        result(CheckOutcome.PASS),
        model={"executor": "trtllm"},
        figures={"32 at once": FIGURES},
        served=served,
    )

    document = json.loads(report_json(made, has_paths=False))

    assert document["report"] == "penstock verify"
    assert document["format"] == 1
    assert document["versions"]["penstock"] == "0.1.0"
    assert document["machine"]["gpus"] == [GPU, GPU]
    assert document["service"] == {
        "arguments": ["--model", "<path>", "--executor=trtllm"],
        "start_s": 61.5,
        "stop_s": 2.0,
        "exit_code": 0,
        "model_kind": "Hugging Face model",
    }
    assert document["model"] == {"executor": "trtllm"}
    assert document["checks"] == [
        {"name": "greedy", "outcome": "PASS", "reason": "seen", "duration_s": 0.25}
    ]
    assert document["figures"]["32 at once"]["tokens_per_s"] == 1234.5


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("--model", "--model"),
        ("demo", "demo"),
        ("/models/my model", "<path>"),
        ("models/llama", "<path>"),
        ("~/llama", "<path>"),
        ("--model=/models/llama", "--model=<path>"),
        (
            '{"lora": {"dirs": ["/a/b", "c"]}, "n": 1}',
            '{"lora": {"dirs": ["<path>", "c"]}, "n": 1}',
        ),
        ('{"is_real_time":true}', '{"is_real_time":true}'),
    ],
)
def test_arguments_lose_their_paths(argument: str, shown: str) -> None:
    assert shown_argument(argument, has_paths=False) == shown
    assert shown_argument(argument, has_paths=True) == argument


def test_reasons_lose_their_paths_and_nothing_else() -> None:
    reason = "INTERNAL: cannot read /home/ada/x.json, ~/y or ../z; 12.5 tokens/s, 2 / 3 of 'a/b'"

    line = result_line(result(CheckOutcome.FAIL, reason), has_paths=False)
    kept = result_line(result(CheckOutcome.FAIL, reason), has_paths=True)

    assert "/home" not in line
    assert "ada" not in line
    assert line.endswith("cannot read <path>, <path> or <path>; 12.5 tokens/s, 2 / 3 of 'a/b'")
    assert kept.endswith(reason)


def test_hosts_are_not_named() -> None:
    reason = (
        "UNAVAILABLE: DNS resolution failed for gpu-17.corp.example:50051; last error:"
        " ipv4:10.2.3.4:50051: refused, ipv6:%5B::1%5D:50051: refused"
    )
    made = report(result(CheckOutcome.FAIL, reason))

    text = report_json(made, has_paths=True, hidden=hidden_names("gpu-17.corp.example:50051"))

    assert json.loads(text)["checks"][0]["reason"] == (
        "UNAVAILABLE: DNS resolution failed for <host>:50051; last error:"
        " <address>: refused, <address>: refused"
    )


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("gpu-17:50051", "gpu-17"),
        ("gpu-17", "gpu-17"),
        ("[fd00::7]:50051", "fd00::7"),
        ("dns:///gpu-17:50051", "gpu-17"),
    ],
)
def test_the_host_of_an_address_is_hidden(address: str, host: str) -> None:
    assert host in hidden_names(address)


def test_this_host_is_hidden_and_loopback_is_not() -> None:
    assert set(hidden_names("127.0.0.1:50051")) <= {socket.gethostname()}
    assert set(hidden_names("")) <= {socket.gethostname()}
