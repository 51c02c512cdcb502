"""Runs `penstock verify` with the TensorRT-LLM executor and the stand-in for TensorRT-LLM."""

import asyncio
import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from support.timeout import TEST_TIMEOUT_S

FAKES = Path(__file__).resolve().parents[1] / "fakes"
# Features that the demo model lacks with every executor.
NEVER = {"adapters", "prompt-logprobs"}
FORMS = {"json-schema", "regex", "grammar", "choice"}
# Options that the default sampler ignores, so that the executor does not offer them.
UNHONOURED = {"seed", "min-tokens", "penalties", "min-p"}


async def verify(config: dict[str, object], report: Path) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.tools", "verify"),
        *("--json", str(report), "--concurrency", "8", "--serve", "--"),
        *("--executor", "trtllm", "--trtllm-config", json.dumps(config)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={
            **{key: value for key, value in os.environ.items() if key[:9] != "PENSTOCK_"},
            "PYTHONPATH": os.pathsep.join((str(FAKES), *sys.path)),
            # Steps that take no time would end requests before they can be cancelled.
            "TLLM_FAKE_CONTROL": json.dumps({"step_s": 0.005}),
        },
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 4 * TEST_TIMEOUT_S)
    finally:
        if process.returncode is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.mark.parametrize(
    ("config", "skipped"),
    [
        ({"guided_decoding_backend": "xgrammar"}, UNHONOURED),
        ({"sampler_type": "TRTLLMSampler"}, FORMS | {"logprobs"}),
    ],
    ids=["guided", "honouring-sampler"],
)
async def test_the_executor_passes(
    tmp_path: Path, config: dict[str, object], skipped: set[str]
) -> None:
    # Few slots, so that some requests wait.
    code, out = await verify({"max_batch_size": 4, **config}, tmp_path / "report.json")

    assert code == 0, out
    document = json.loads((tmp_path / "report.json").read_text())
    outcomes = {check["name"]: check["outcome"] for check in document["checks"]}
    assert {name for name, outcome in outcomes.items() if outcome == "SKIP"} == skipped | NEVER
    assert outcomes["tensorrt-llm-source"] == "PASS"
    assert document["model"]["executor"] == "trtllm"
    assert document["service"]["model_kind"] == "Hugging Face model"
